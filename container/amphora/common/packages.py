"""Where pip takes packages from for the user's code: AWS CodeArtifact, a private index, wheels.

`CA_REPOSITORY_ARN` means what it does to sagemaker-training and sagemaker-inference: the index is
that repository, whatever PIP_INDEX_URL says. They put the token into pip's argv; here it stands in
a file that only this user reads and that lives as long as one run of pip, since pip itself repeats
an index's URL in the argv of the processes that build packages. Everything else is pip's own: its
variables (PIP_INDEX_URL, PIP_NO_INDEX, HTTPS_PROXY ...) and files (PIP_CONFIG_FILE) reach it as
they are.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import netrc
import re
import subprocess
import sys
import tempfile
from ast import literal_eval
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from amphora.common import logs
from amphora.common.errors import CodeError, ConfigError

ARN = "CA_REPOSITORY_ARN"
NO_INDEX = "no index"
"""How a description of the sources begins where pip asks none."""
_ARN_FORM = "arn:aws:codeartifact:REGION:ACCOUNT:repository/DOMAIN/REPOSITORY"
_ARN_PARTS = re.compile(
    r"arn:aws[a-z-]*:codeartifact:(?P<region>[a-z0-9-]+):(?P<account>\d{12})"
    r":repository/(?P<domain>[a-z0-9-]+)/(?P<name>[A-Za-z0-9][\w.-]*)"
)
_CONNECT_SECONDS, _READ_SECONDS, _ATTEMPTS = 5, 15, 3
_KEPT = ("torch", "torchvision", "torchaudio", "torch-xla", "torch-neuronx")
"""What stays as the image has it: another one may compute on the CPU, in silence."""
_TRUE = ("1", "true", "yes", "on", "t", "y")
# What pip says of a failure, and the remedy that fits: the first that is found counts. Not compiled
# before a failure: that would take a tenth of a job's way to its script.
_REMEDIES: tuple[tuple[str, str], ...] = (
    (
        r"The user requested \(constraint\) torch",
        "The image's torch stays, since its drivers, its other libraries and the handlers are made"
        " for it. Leave torch out of the requirements, ask for the version named after"
        " '(constraint)', or take a version of the other package that runs with it. For another"
        " torch build the image on another base (./build_and_push.sh ... --base-image).",
    ),
    (
        r"\b40[13] (?:Client )?Error|Credentials not correct|\b40[13]: ",
        "The index refuses the credentials: check the user and password in its URL, or what the"
        " job's role may read (codeartifact:ReadFromRepository).",
    ),
    (
        r"SSLError|CERTIFICATE_VERIFY_FAILED|SSL: ",
        "Give the index's certificate by PIP_CERT (a file in the container), or PIP_TRUSTED_HOST.",
    ),
    (
        r"connection broken by|ProxyError|NewConnectionError|ConnectTimeout|Max retries",
        "The index cannot be reached: check the subnets, security groups and endpoints of the VPC,"
        " and HTTPS_PROXY and NO_PROXY. Without a way to an index bring the wheels in the code"
        " folder (--no-index and --find-links in requirements.txt), or install them in the image.",
    ),
)
_USUAL_REMEDY = (
    "Check the names and versions, and that this index has them. Without a way to a package index,"
    " bring the wheels in the code folder (--find-links in requirements.txt), or install them in"
    " the image."
)
_LOG_TIME = re.compile(r"^\d{4}-\d\d-\d\dT[\d:,.]+ ")
_USERINFO = re.compile(r"://([^\s/:@]*)(?::([^\s/]*))?@")
# In its log, what ends the output of a program that pip ran in vain, to build a package.
_BUILD_END = "[present-rich]"
_TOLD_LINES, _LINE_CHARS, _LOG_BYTES = 4, 240, 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A repository of AWS CodeArtifact."""

    region: str
    account: str
    domain: str
    name: str

    @property
    def shown(self) -> str:
        return f"CodeArtifact's {self.name} of {self.domain} ({self.account}, {self.region})"


@dataclass(frozen=True, kw_only=True)
class Install:
    """One run of pip, in the folder of the user's code."""

    requirements: str = ""
    """A requirements file in it; '' means the folder itself, which is a package."""

    @property
    def what(self) -> str:
        """What is installed, for a message."""
        return self.requirements or "the package in the code folder"


@dataclass(frozen=True, kw_only=True)
class Index:
    """What one run of pip is given."""

    argv: tuple[str, ...]
    environ: Mapping[str, str]
    shown: str
    """Where packages come from, without credentials."""
    log: Path
    """What pip writes about everything it does; there within the block of `index` only."""


def repository(environ: Mapping[str, str]) -> Repository | None:
    """What CA_REPOSITORY_ARN names, or None. Raises ConfigError if it is no repository's ARN."""
    arn = environ.get(ARN, "").strip()
    if not arn:
        return None
    parts = _ARN_PARTS.fullmatch(arn)
    if parts is None:
        raise ConfigError(
            f"{ARN} is {arn!r}, which is not a repository of AWS CodeArtifact.",
            f"Give {_ARN_FORM} (aws codeartifact describe-repository), or leave it out.",
        )
    return Repository(**parts.groupdict())


@contextlib.contextmanager
def index(environ: Mapping[str, str], folder: Path, install: Install) -> Iterator[Index]:
    """What pip is given to install what the code in `folder` asks for, within the block.

    A token of CodeArtifact is asked for at each call, so that it never is an old one.

    Raises:
        ConfigError: CA_REPOSITORY_ARN is not a repository's.
        CodeError: CodeArtifact gives no token or no address for it.
    """
    found, settings, own = _sources(environ, folder, install)
    shown = _shown(found, settings, own, environ)
    with tempfile.TemporaryDirectory(prefix="amphora-index-") as scratch:
        # pip passes over an index that refuses it, and only tells its log so.
        log = Path(settings.get("log") or f"{scratch}/pip.log")
        given = {**environ, "PIP_LOG": str(log)}
        if found is not None and not _takes_no_index(settings, own):
            address, token = _authorized(found)
            logs.remember([token])
            named = environ.get("NETRC")
            users = Path(named) if named else Path(environ.get("HOME") or Path.home()) / ".netrc"
            # Ours takes the place of the user's own; one that cannot be read is none to pip either.
            others = ""
            with contextlib.suppress(OSError, ValueError, netrc.NetrcParseError):
                netrc.netrc(str(users))
                others = users.read_text(encoding="utf-8")
            private = Path(scratch) / "netrc"
            private.touch(mode=0o600)
            login = f"machine {urlsplit(address).hostname} login aws password {token}\n"
            # A host's last entry counts.
            private.write_text(f"{others}\n\n{login}", encoding="utf-8")
            given |= {"PIP_INDEX_URL": address, "NETRC": str(private)}
        # Not by PIP_CONSTRAINT, which would hold for the tools that build a package, too.
        kept = Path(scratch) / "image.txt"
        with kept.open("w", encoding="utf-8") as lines:
            for name in _KEPT:
                with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                    lines.write(f"{name}=={importlib.metadata.version(name)}\n")
        asked = ("-r", install.requirements) if install.requirements else (".",)
        argv = (sys.executable, "-m", "pip", "install", "--no-input", "-c", str(kept), *asked)
        yield Index(argv=argv, environ=given, shown=shown, log=log)


def described(environ: Mapping[str, str], folder: Path, install: Install) -> str:
    """Where pip would take the packages of the code in `folder` from, without credentials.

    Nothing is asked of a network. Raises ConfigError as `repository` does.
    """
    return _shown(*_sources(environ, folder, install), environ)


def failed(
    install: Install, folder: Path, exit_code: int, lines: Sequence[str], index: Index
) -> CodeError:
    """The error for a run of pip that failed, to be made within the block of `index`.

    Args:
        install: What was to be installed.
        folder: Where.
        exit_code: pip's.
        lines: What it printed.
        index: What it was given.
    """
    with contextlib.suppress(OSError):
        text = index.log.read_bytes()[-_LOG_BYTES:].decode("utf-8", "replace")
        # What follows is a traceback of pip's own.
        lines = [*(text.rpartition("Exception information:")[0] or text).splitlines(), *lines]
    masked = (logs.mask(_LOG_TIME.sub("", line).strip()) for line in lines)
    said = [line for line in masked if line]
    warned = [line for line in said if any(re.search(sign, line) for sign, _ in _REMEDIES)][-1:]
    shown = [line for line in dict.fromkeys(said) if line not in warned and _BUILD_END not in line]
    errors = [line for line in shown if "ERROR" in line]
    # One warning of many tries: the first 1,024 characters are all that is shown.
    told = [*warned, *_explained(said), *(errors or shown[-_TOLD_LINES:])[-_TOLD_LINES:]]
    text = " ".join(line[:_LINE_CHARS] for line in dict.fromkeys(told))
    remedy = next((say for sign, say in _REMEDIES if re.search(sign, text)), _USUAL_REMEDY)
    return CodeError(
        f"{install.what} of {folder} cannot be installed (pip's exit code {exit_code}) from"
        f" {index.shown}: {text}",
        remedy,
    )


def _explained(said: Sequence[str]) -> list[str]:
    """The lines before pip's verdict that give its reason: of a failed build, or of a conflict."""
    end = next((place for place, line in enumerate(said) if _BUILD_END in line), None)
    if end is not None:
        starts = (n for n, line in enumerate(said[:end]) if line.startswith("Running command "))
        output = said[max(starts, default=-1) + 1 : end]
        return [*[line for line in output if re.search(r"\berror: ", line)][:1], *output[-1:]]
    conflict = re.search(
        r"^The conflict is caused by:\n(.*?)\nTo fix this",
        "\n".join(said),
        re.MULTILINE | re.DOTALL,
    )
    return conflict[1].splitlines()[:_TOLD_LINES] if conflict else []


def _shown(
    found: Repository | None,
    settings: Mapping[str, str],
    own: Sequence[str],
    environ: Mapping[str, str],
) -> str:
    """Where packages come from, in one line."""
    if _takes_no_index(settings, own):
        parts = [NO_INDEX]
    else:
        replaced = ", in place of PIP_INDEX_URL" if environ.get("PIP_INDEX_URL") else ""
        usual = _without_credentials(settings.get("index-url", "")) or "pip's default index"
        parts = [f"{found.shown}{replaced}" if found else usual]
        parts += map(_without_credentials, settings.get("extra-index-url", "").split())
    links = settings.get("find-links", "").split()
    parts += [f"links of {_without_credentials(each)}" for each in links]
    proxies = (environ.get(name) for name in ("PIP_PROXY", "HTTPS_PROXY", "https_proxy"))
    if proxy := next(filter(None, proxies), ""):
        parts.append(f"by the proxy {_without_credentials(proxy)}")
    text = ", ".join(parts)
    if own:
        text += f" (the requirements themselves say {' '.join(own)}, which counts first)"
    return text


def _takes_no_index(settings: Mapping[str, str], own: Sequence[str]) -> bool:
    """Whether pip asks no index, by its settings or the requirements file."""
    return settings.get("no-index", "").strip().lower() in _TRUE or "--no-index" in own


def _authorized(found: Repository) -> tuple[str, str]:
    """The address of the repository's index, and a token for it. Raises CodeError."""
    # boto3 is a quarter of a second to import.
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

    config = Config(
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=_READ_SECONDS,
        retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
    )
    owner = {"domain": found.domain, "domainOwner": found.account}
    try:
        client: Any = boto3.client("codeartifact", region_name=found.region, config=config)
        token = client.get_authorization_token(**owner)["authorizationToken"]
        address = client.get_repository_endpoint(**owner, repository=found.name, format="pypi")
    except (BotoCoreError, ClientError) as error:
        if isinstance(error, NoCredentialsError):
            remedy = "Give the job or endpoint a role; on a laptop set AWS_ACCESS_KEY_ID and so on."
        elif not isinstance(error, ClientError):
            remedy = (
                "Check the network: a VPC needs the endpoints codeartifact.api and"
                " codeartifact.repositories, and S3's gateway; HTTPS_PROXY and NO_PROXY count."
            )
        elif error.response["Error"]["Code"] == "ResourceNotFoundException":
            remedy = "Check the account, the domain and the repository in it."
        else:
            remedy = (
                "Allow the role codeartifact:GetAuthorizationToken and GetRepositoryEndpoint,"
                " ReadFromRepository, and sts:GetServiceBearerToken."
            )
        raise CodeError(f"{ARN}: {found.shown} cannot be used: {error}.", remedy) from error
    return f"{address['repositoryEndpoint'].rstrip('/')}/simple/", token


def _sources(
    environ: Mapping[str, str], folder: Path, install: Install
) -> tuple[Repository | None, dict[str, str], list[str]]:
    """What decides on where pip looks: CA_REPOSITORY_ARN; pip's options by their long names, from
    its files and variables; and the options of the requirements file and of those that it names,
    without credentials.

    The credentials in all of them are masked from now on.
    """
    found = repository(environ)
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        env=dict(environ),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    # A file that cannot be read is pip's to complain of, when it installs.
    settings: dict[str, str] = {}
    rows = [row for row in (line.partition("=") for line in listed.stdout.splitlines()) if row[1]]
    for section in ("global.", "install.", ":env:."):
        for key, _, value in rows:
            if key.startswith(section):
                settings[key.removeprefix(section)] = str(literal_eval(value))
    # Its patterns are compiled only where something is installed.
    from amphora.common import requirements

    # Files that pip is told of by its settings count as the code's own.
    files = [install.requirements] if install.requirements else []
    files += [*settings.get("requirement", "").split(), *settings.get("constraint", "").split()]
    asked = requirements.read(files, folder, environ)
    proxies = (value for name, value in environ.items() if name.lower().endswith("_proxy"))
    for place in (*settings.values(), *proxies, asked.text):
        for user, password in _USERINFO.findall(place):
            # pip shows the user's name, which is the secret if there is no password.
            secret = user if password in ("", "x-oauth-basic") else password
            logs.remember({secret, unquote(secret)})
    own = [_without_credentials(word) for option in asked.options for word in option if word]
    # What these say is not known before pip fetches them.
    own += [word for each in asked.remote for word in ("-r", _without_credentials(each))]
    return found, settings, own


def _without_credentials(url: str) -> str:
    """A URL as it may be shown: no user, password, query or fragment; paths as they are."""
    if "://" not in url:
        return url
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
