"""Installs what the user's code requires: from AWS CodeArtifact, a private index, or wheels.

`CA_REPOSITORY_ARN` works as in sagemaker-training and sagemaker-inference: that repository is the
index, whatever PIP_INDEX_URL says. The token is in a netrc file for one run of pip, in place of the
user's, and not in the index's URL, which pip repeats in the argv of the processes that build
packages. pip reads its own variables and files as usual.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from amphora.common import logs
from amphora.common.aws import aws_client
from amphora.common.errors import CodeError, ConfigError

ARN = "CA_REPOSITORY_ARN"
_NO_INDEX = "no index"
_ARN_PARTS = re.compile(
    r"arn:aws[a-z-]*:codeartifact:(?P<region>[a-z0-9-]+):(?P<account>\d{12})"
    r":repository/(?P<domain>[a-z0-9-]+)/(?P<name>[A-Za-z0-9][\w.-]*)"
)
_REPOSITORY = "CodeArtifact's {name} of {domain} ({account}, {region})"
REQUIREMENTS, PACKAGE = "requirements.txt", "the package in the code folder"
"""What one run of pip installs: a requirements file, or the folder of the user's code itself."""
_KEPT = ("torch", "torchvision", "torchaudio", "torch-xla", "torch-neuronx")
"""Packages that keep the image's version: another build may silently compute on the CPU."""
_USUAL_NAMES = ("setup", "test")
"""Modules that nobody imports: the first is pip's, the second that of Python's own tests."""
_TRUE = ("1", "true", "yes", "on", "t", "y")
# Patterns in pip's output, with the remedy; the first match counts. They are compiled only after a
# failure, because compiling them would delay every start.
_REMEDIES: Mapping[str, str] = {
    r"The user requested \(constraint\) torch": (
        "The image's torch stays: the other libraries are built for it. Leave torch out of"
        " the requirements, request the version after '(constraint)', or choose a version of the"
        " other package that runs with it. For another torch, build the image on another base"
        " (./build_and_push.sh ... --base-image)."
    ),
    r"\b40[13] (?:Client )?Error|Credentials not correct|\b40[13]: ": (
        "The index refuses the credentials: check the user and password in its URL, or what the"
        " job's role may read (codeartifact:ReadFromRepository)."
    ),
    r"subprocess-exited-with-error|metadata-generation-failed|Failed (?:to build|building)": (
        f"This version has no wheel for Python {sys.version_info[0]}.{sys.version_info[1]} and"
        " cannot be built here. Choose a version with a wheel, mostly a newer one, or install it in"
        " an image based on this one."
    ),
    r"SSLError|CERTIFICATE_VERIFY_FAILED|SSL: ": (
        "Set PIP_CERT to the index's certificate (a file in the container), or PIP_TRUSTED_HOST."
    ),
    r"connection broken by|ProxyError|NewConnectionError|ConnectTimeout|Max retries": (
        "The index cannot be reached: check the subnets, security groups and endpoints of the VPC,"
        " and HTTPS_PROXY and NO_PROXY. Without network access, put the wheels into the code"
        " folder (--no-index and --find-links in requirements.txt), or install them in the image."
    ),
}
_USUAL_REMEDY = (
    "Check the names and versions, and that the index has them. Without network access, put the"
    " wheels into the code folder (--find-links in requirements.txt), or install them in the image."
)
_LOG_TIME = re.compile(r"^\d{4}-\d\d-\d\dT[\d:,.]+ ")
_USERINFO = re.compile(r"://([^\s/:@]*)(?::([^\s/]*))?@")
# In pip's log, the end of the output of a build that failed.
_BUILD_END = "[present-rich]"
_SHOWN_LINES, _LINE_CHARS, _LOG_BYTES = 4, 240, 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Index:
    """Holds the command, environment and log of one run of pip."""

    argv: tuple[str, ...]
    environ: Mapping[str, str]
    shown: str
    """The index, without credentials."""
    log: Path
    """pip's verbose log, which exists within the block of `index` only."""


def repository(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return region, account, domain and name of CA_REPOSITORY_ARN, or nothing if it is not set.

    Raises ConfigError if it is malformed.
    """
    arn = environ.get(ARN, "").strip()
    if not arn:
        return {}
    parts = _ARN_PARTS.fullmatch(arn)
    if parts is None:
        raise ConfigError(
            f"{ARN} is {arn!r}, which is not a repository of AWS CodeArtifact.",
            "Give arn:aws:codeartifact:REGION:ACCOUNT:repository/DOMAIN/REPOSITORY"
            " (aws codeartifact describe-repository), or leave it out.",
        )
    return parts.groupdict()


@contextlib.contextmanager
def index(environ: Mapping[str, str], folder: Path, install: str) -> Iterator[Index]:
    """Prepare one run of pip for the code in `folder`. A CodeArtifact token is requested each time.

    Args:
        install: A requirements file in that folder, or PACKAGE.

    Raises ConfigError if CA_REPOSITORY_ARN is malformed, CodeError if CodeArtifact refuses.
    """
    names = (name for name in environ if name.startswith("PIP_") or name.lower().endswith("_proxy"))
    texts = [environ[name] for name in names]
    if (requirements := folder / install).is_file():
        texts.append(requirements.read_text(encoding="utf-8", errors="replace"))
    for user, password in _USERINFO.findall("\n".join(texts)):
        # pip prints the user's name, which is the secret if there is no password.
        secret = user if password in ("", "x-oauth-basic") else password
        logs.remember({secret, unquote(secret)})
    source = repository(environ)
    shown = described(environ)
    with tempfile.TemporaryDirectory(prefix="amphora-index-") as scratch:
        # pip skips an index that refuses it, and says so in its log only.
        log = Path(environ.get("PIP_LOG") or f"{scratch}/pip.log")
        variables = {**environ, "PIP_LOG": str(log)}
        if source and shown != _NO_INDEX:
            address, token = _authorized(source)
            logs.remember([token])
            private = Path(scratch) / "netrc"
            private.touch(mode=0o600)
            private.write_text(f"machine {urlsplit(address).hostname} login aws password {token}\n")
            variables |= {"PIP_INDEX_URL": address, "NETRC": str(private)}
        # Not PIP_CONSTRAINT, which would also apply to the tools that build a package.
        kept = Path(scratch) / "image.txt"
        with kept.open("w", encoding="utf-8") as lines:
            for name in _KEPT:
                with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                    lines.write(f"{name}=={importlib.metadata.version(name)}\n")
        target = (".",) if install == PACKAGE else ("-r", install)
        argv = (sys.executable, "-m", "pip", "install", "--no-input", "-c", str(kept), *target)
        yield Index(argv=argv, environ=variables, shown=shown, log=log)


def described(environ: Mapping[str, str]) -> str:
    """Name the index that the environment selects, without credentials.

    A requirements file or pip's configuration files may select another one; pip logs it.
    """
    if environ.get("PIP_NO_INDEX", "").strip().lower() in _TRUE:
        return _NO_INDEX
    source, url = repository(environ), environ.get("PIP_INDEX_URL", "")
    if source:
        return _REPOSITORY.format_map(source) + (", in place of PIP_INDEX_URL" if url else "")
    if "://" in url:
        parts = urlsplit(url)
        url = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    return url or "pip's default index"


def failed(
    install: str, folder: Path, exit_code: int, lines: Sequence[str], index: Index
) -> CodeError:
    """Build the error for a failed run of pip, from the lines that it printed and from its log.

    Call it within the block of `index`.
    """
    with contextlib.suppress(OSError):
        text = index.log.read_bytes()[-_LOG_BYTES:].decode("utf-8", "replace")
        # What follows is pip's own traceback.
        lines = [*(text.rpartition("Exception information:")[0] or text).splitlines(), *lines]
    masked = (logs.mask(_LOG_TIME.sub("", line).strip()) for line in lines)
    output = [line for line in masked if line]
    # One warning stands for many retries, since 1,024 characters are shown.
    known = [line for line in output if any(re.search(sign, line) for sign in _REMEDIES)][-1:]
    rest = [line for line in dict.fromkeys(output) if line not in known and _BUILD_END not in line]
    errors = [line for line in rest if "ERROR" in line] or rest
    # The lines that explain a failed build or a version conflict.
    explanation: list[str] = []
    end = next((index for index, line in enumerate(output) if _BUILD_END in line), None)
    causes = r"(?ms)^The conflict is caused by:\n(.*?)\nTo fix this"
    if end is not None:
        starts = (n for n, line in enumerate(output[:end]) if line.startswith("Running command "))
        build = output[max(starts, default=-1) + 1 : end]
        explanation = [line for line in build if re.search(r"\berror: ", line)][:1] + build[-1:]
    elif conflict := re.search(causes, "\n".join(output)):
        # The versions of one package may fill many lines; the last one names what they met.
        causes_listed = conflict[1].splitlines()
        explanation = [*causes_listed[: _SHOWN_LINES - 1], *causes_listed[_SHOWN_LINES - 1 :][-1:]]
    shown = dict.fromkeys([*known, *explanation, *errors[-_SHOWN_LINES:]])
    text = " ".join(line[:_LINE_CHARS] for line in shown)
    remedy = next(
        (advice for sign, advice in _REMEDIES.items() if re.search(sign, text)), _USUAL_REMEDY
    )
    what = f"{install} of {folder} cannot be installed (pip's exit code {exit_code})"
    return CodeError(f"{what} from {index.shown}: {text}", remedy)


def hidden_modules(folder: Path) -> list[Path]:
    """Return the files and packages of a code folder that hide installed modules from imports."""
    libraries = [sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")]
    files = [path for path in folder.glob("*.py") if path.stem not in _USUAL_NAMES]
    packages = [path.parent for path in folder.glob("*/__init__.py")]
    return [
        path
        for path in sorted([*files, *packages])
        if (spec := PathFinder.find_spec(path.stem, libraries)) is not None and spec.has_location
    ]


def hidden_module_remedy(folder: Path, message: str) -> str:
    """Return what to do about an error whose message names a hidden module, or ""."""
    named = re.search(r"(?:module|from) '(\w+)'", message)
    hiding = hidden_modules(folder) if named is not None else []
    paths = [path for path in hiding if named is not None and path.stem == named[1]]
    return f"{paths[0]} hides the installed module {paths[0].stem}: rename it." if paths else ""


def _authorized(source: Mapping[str, str]) -> tuple[str, str]:
    """Request the address of the repository's index and a token. Raises CodeError."""
    owner = {"domain": source["domain"], "domainOwner": source["account"]}
    problem = f"{ARN}: {_REPOSITORY.format_map(source)} cannot be used"
    remedy = (
        "Check the account, the domain and the repository in it; the role, which needs"
        " codeartifact:GetAuthorizationToken and GetRepositoryEndpoint, ReadFromRepository and"
        " sts:GetServiceBearerToken; and the network: a VPC needs the endpoints"
        " codeartifact.api and codeartifact.repositories, and S3's gateway; HTTPS_PROXY and"
        " NO_PROXY count."
    )
    with aws_client(
        "codeartifact", CodeError, problem, remedy, region_name=source["region"]
    ) as client:
        token = client.get_authorization_token(**owner)["authorizationToken"]
        address = client.get_repository_endpoint(**owner, repository=source["name"], format="pypi")
    return f"{address['repositoryEndpoint'].rstrip('/')}/simple/", token
