"""Compiled programs kept beside a model's files (`amphora compile`), for endpoints that serve it.

They are used where what they were made of is what there is: the same model, versions, device and
settings. Else they are compiled anew, and the log says why.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

from recipe.errors import ModelError
from recipe.inference import precision
from recipe.inference.static import buckets
from recipe.inference.static.programs import DEVICES
from recipe.runtime import xla
from recipe.storage import checksums

FOLDER, MANIFEST, CACHE = "compiled-programs", "manifest.json", "cache"
_PACKAGES = ("torch", "torch-xla", "torch-neuronx", "libneuronxla", "neuronx-cc", "transformers")
_SETTINGS = ("HF_TASK", "AMPHORA_ANSWERS", "AMPHORA_COMPILE", "NEURON_LOGICAL_NC_CONFIG")
"""Flags of compilers are part of what they name a program by."""
_VARIABLES = {"xla": "NEURON_COMPILE_CACHE_URL", "neuron": "TORCH_NEURONX_NEFF_CACHE_DIR"}
_OPTION = "--cache_dir"
"""Of NEURON_CC_FLAGS: on XLA it beats the variable."""
Environ = MutableMapping[str, str]


def write(model_dir: Path, environ: Environ, load: Callable[[], Any]) -> None:
    """Compile a model's programs and keep them in its folder, in place of those that were there.

    Args:
        model_dir: It must be writable.
        environ: This process's. It is changed.
        load: Loads the model as it is served.

    Raises:
        ModelError: There is no model, this host's device compiles nothing ahead, or a place for
            programs is named, which would have them.
        RecipeError: What `load` raises.
    """
    kind = precision.chosen(environ)[0]
    if kind not in DEVICES:
        raise ModelError(
            f"There is nothing to compile: models are computed on {kind} here, without programs of "
            "fixed shapes.",
            "Run it on a Neuron image, on an instance with Neuron cores.",
        )
    if not any((model_dir / name).is_file() for name in ("config.json", "modules.json")):
        raise ModelError(
            f"There is no config.json in {model_dir}.",
            "Name the folder that save_pretrained wrote, or its model.tar.gz.",
        )
    if named := _named_place(kind, environ):
        raise ModelError(
            f"{named} names a place for compiled programs.",
            "Leave it out: they are kept in the model's folder.",
        )
    folder = model_dir / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    (folder / CACHE).mkdir(parents=True)
    try:
        stamp = _stamp(model_dir, environ)
        _take(kind, folder / CACHE, environ)
        load()
        files = [path for path in (folder / CACHE).rglob("*") if path.is_file()]
        if not files:
            raise ModelError(
                f"The compiler has left no program in {folder / CACHE}.",
                "Its version may keep none; serve the model without compiling it ahead.",
            )
        manifest = {**stamp, "buckets": environ.get(buckets.NAME, "")}
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    size = sum(path.stat().st_size for path in files) / 1e6
    print(f"programs: {len(files)} files, {size:.1f} MB, are kept in {folder}", flush=True)


def use(model_dir: Path, environ: Environ) -> None:
    """Let this process find the programs beside a model, if they are this model's and this host's.

    Args:
        model_dir: It may be read-only.
        environ: This process's. The compiler's variable is set in it, and AMPHORA_BUCKETS where it
            is not.
    """
    try:
        manifest = json.loads((model_dir / FOLDER / MANIFEST).read_text())
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        print(f"programs: those beside the model are not used: {error}", flush=True)
        return
    kind = precision.chosen(environ)[0]
    if kind not in DEVICES:
        return
    now = _stamp(model_dir, environ)
    why = _difference(manifest, now)
    if not why and (named := _named_place(kind, environ)):
        why = f"{named} names another place"
    if why:
        print(f"programs: those beside the model are not used: {why}", flush=True)
        return
    if not environ.get(buckets.NAME) and manifest["buckets"]:
        environ[buckets.NAME] = manifest["buckets"]
    place = _copied(model_dir / FOLDER)
    _take(kind, place, environ)
    print(f"programs: those beside the model are used, from a copy in {place}", flush=True)


def _copied(folder: Path) -> Path:
    """A copy of the programs in a folder, for all workers of this host: the model's folder may be
    read-only, and compilers write locks beside what they read."""
    name = f"programs-{checksums.digest(folder / MANIFEST)[:20]}"
    own = Path(tempfile.gettempdir()) / f"amphora-{os.getuid()}"
    own.mkdir(mode=0o700, exist_ok=True)
    # Whoever owns the folder could put other programs there.
    parent = own if own.stat().st_uid == os.getuid() else Path(tempfile.mkdtemp())
    if not (parent / name).is_dir():
        copy = Path(tempfile.mkdtemp(dir=parent))
        shutil.copytree(folder / CACHE, copy, dirs_exist_ok=True)
        try:
            copy.rename(parent / name)
        except OSError:  # another worker was faster
            shutil.rmtree(copy)
    return parent / name


def _take(kind: str, place: Path, environ: Environ) -> None:
    """Let the compiler keep its programs in a folder, and look for them there."""
    if kind == "xla" and xla.device_type() != "NEURON":
        xla.keep_programs(place)
    else:
        environ[_VARIABLES[kind]] = str(place)


def _named_place(kind: str, environ: Environ) -> str:
    """The variable that says where programs are kept; empty if none does."""
    if kind == "xla" and _OPTION in environ.get("NEURON_CC_FLAGS", ""):
        return f"NEURON_CC_FLAGS ({_OPTION})"
    return _VARIABLES[kind] if environ.get(_VARIABLES[kind]) else ""


def _stamp(model_dir: Path, environ: Environ) -> dict[str, Any]:
    """What programs are made of: the model, the device, the versions and settings."""
    kind, name, _ = precision.chosen(environ)
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = ""
    return {
        "model": _digest(model_dir),
        "device": f"{kind} {xla.device_type()}" if kind == "xla" else kind,
        "precision": name,
        "versions": versions,
        "settings": {name: environ.get(name, "") for name in _SETTINGS},
    }


def _digest(model_dir: Path) -> str:
    """Of the model's SHA256SUMS, whose sums are compared where it is loaded; else of its files."""
    sums = model_dir / checksums.NAME
    if sums.is_file():
        return checksums.digest(sums)
    hashed = hashlib.sha256()
    for path in sorted(model_dir.rglob("*")):
        name = path.relative_to(model_dir)
        if path.is_file() and name.parts[0] not in (FOLDER, "code", "README.md"):
            hashed.update(f"{name.as_posix()} {checksums.digest(path)}\n".encode())
    return hashed.hexdigest()


def _difference(manifest: Any, now: dict[str, Any]) -> str:
    """What of it is not as it was; empty if all is."""
    if not isinstance(manifest, dict) or not isinstance(manifest.get("buckets"), str):
        return f"{MANIFEST} is not one that amphora compile wrote"
    for name, value in now.items():
        then = manifest.get(name)
        if then == value:
            continue
        if name == "model":
            return "they are another model's, or its files have changed"
        if isinstance(value, dict) and isinstance(then, dict):
            pairs = ((key, then.get(key), own) for key, own in value.items())
            key, was, own = next(pair for pair in pairs if pair[1] != pair[2])
            return f"{key} is {own or 'not there'!s}, and was {was or 'not there'}"
        return f"the {name} is {value}, and was {then}"
    return ""
