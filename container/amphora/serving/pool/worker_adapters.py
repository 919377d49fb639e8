"""The adapters that requests may name: loaded in every worker of a pool, or in none.

An adapter's folder is copied first. So all workers, and those that replace them later, have the
same files, whatever becomes of the folder.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from amphora.serving.pool.connections import WorkerConnection
from amphora.serving.pool.spawner import ModelLoadError
from amphora.serving.protocol import messages
from amphora.serving.protocol.media_types import Fault, bad_request
from amphora.serving.protocol.messages import Adapt, Adapted
from amphora.serving.settings import ADAPTER_CONFIG, ADAPTERS, ServerSettings

LOG = logging.getLogger("amphora.pool")
_MOST_FILES = 1000


class WorkerAdapters:
    """The adapters of a pool's workers."""

    def __init__(
        self, settings: ServerSettings, connections: Mapping[int, WorkerConnection]
    ) -> None:
        self.sources: dict[str, str] = {}
        """The folders of the loaded adapters by their names, as they were given."""
        self.described: dict[str, dict[str, Any]] = {}
        """What the handlers say of each."""
        self.changing = asyncio.Lock()
        """Held while they change, and while a worker starts."""
        self._settings = settings
        self._connections = connections
        self._folders: dict[str, str] | None = None
        """What the workers load: folders of the model, or copies; None before the first starts."""
        self._copies: set[str] = set()

    def close(self) -> None:
        """Remove the copies."""
        for copy in self._copies:
            shutil.rmtree(copy, ignore_errors=True)

    async def restore(self, connection: WorkerConnection, description: Mapping[str, Any]) -> None:
        """Load all adapters in a worker that has started, at first those of the model's folder.
        Raises ModelLoadError with the reason if one cannot be loaded, or the model takes none, and
        EOFError if the worker ends.

        The worker must not have any requests yet.
        """
        if self._folders is None:
            folder = self._settings.model_dir / ADAPTERS
            paths = folder.glob(f"*/{ADAPTER_CONFIG}") if description.get("adapters") else ()
            self._folders = {path.parent.name: str(path.parent) for path in sorted(paths)}
            self.sources = dict(self._folders)
        limit = self._settings.startup_timeout
        try:
            if self._settings.adapters and description.get("adapters") is False:
                raise ModelLoadError(
                    "AMPHORA_ADAPTERS is set, or the model has a folder adapters/; encoders take"
                    " adapters by name, and decoders that vLLM serves: this is neither.",
                    "Use the image with vLLM for a decoder; else merge each adapter into its base"
                    " (merge_and_unload), serve it as a model of its own, and set AMPHORA_ADAPTERS"
                    " to 0.",
                )
            for name, source in self._folders.items():
                connection.writer.write(messages.pack(Adapt(name=name, folder=source)))
                outcome, _ = await asyncio.wait_for(messages.read(connection.reader), limit)
                if outcome.reason:
                    raise ModelLoadError(f"The adapter {name!r} cannot be loaded: {outcome.reason}")
                self.described[name] = outcome.description
        except BaseException:
            connection.kill()
            connection.close()
            raise

    async def load(self, name: str, folder: Path, base: str) -> None:
        """Load an adapter in all workers.

        Args:
            base: The name of the model.

        Raises Fault: as `check_new`; 400 with the worker's reason, 503 without a worker, 507 if
        there is no space for a copy.
        """
        async with self.changing:
            check_new(name, folder, {base, *self.sources}, len(self.sources), self._settings)
            if self._folders is None or not self._connections:
                raise Fault(503, "not_ready", "No worker has loaded the model.")
            copy = await asyncio.to_thread(_copy, folder)
            self._copies.add(copy)
            outcomes = await self._tell(Adapt(name=name, folder=copy))
            if reason := next((outcome.reason for outcome in outcomes if outcome.reason), ""):
                await self._tell(Adapt(name=name))
                await self._remove(copy)
                raise Fault(400, "adapter_not_loaded", reason.replace(copy, str(folder)))
            self._folders[name], self.sources[name] = copy, str(folder)
            self.described[name] = outcomes[0].description

    async def unload(self, name: str) -> None:
        """Unload an adapter from all workers. Raises Fault (404) if it is not loaded."""
        async with self.changing:
            if self._folders is None or self.sources.pop(name, None) is None:
                raise Fault(404, "adapter_not_found", f"The adapter {name!r} is not loaded.")
            folder = self._folders.pop(name)
            del self.described[name]
            await self._tell(Adapt(name=name))
            if folder in self._copies:
                await self._remove(folder)

    async def _remove(self, copy: str) -> None:
        self._copies.remove(copy)
        await asyncio.to_thread(shutil.rmtree, copy, ignore_errors=True)

    async def _tell(self, order: Adapt) -> list[Adapted]:
        """Send an order to all workers, and wait for their answers. A worker that ends, or is
        killed since it does not answer, gives the reason."""

        async def ask(connection: WorkerConnection) -> Adapted:
            answer = connection.adapted = asyncio.get_running_loop().create_future()
            connection.writer.write(messages.pack(order))
            try:
                return await asyncio.wait_for(answer, self._settings.startup_timeout)
            except asyncio.TimeoutError:
                connection.kill()
                return Adapted(name=order.name, description={}, reason="A worker did not answer.")
            except EOFError:
                return Adapted(name=order.name, description={}, reason="A worker died of it.")
            finally:
                connection.adapted = None

        return list(await asyncio.gather(*map(ask, list(self._connections.values()))))


def check_new(
    name: str, folder: Path, taken: Collection[str], count: int, settings: ServerSettings
) -> None:
    """Check the order to load an adapter.

    Args:
        taken: The names of the model and of all adapters.
        count: How many adapters are loaded.

    Raises Fault: 409 for a name that is taken, 404 without its files, 507 beyond AMPHORA_ADAPTERS.
    """
    if name in taken:
        raise Fault(409, "adapter_already_loaded", f"{name!r} is already loaded.")
    if not (folder / ADAPTER_CONFIG).is_file():
        raise Fault(404, "adapter_not_found", f"{folder} holds no {ADAPTER_CONFIG}.")
    if count >= (most := settings.adapters):
        loaded = f"{count} adapters are loaded, and AMPHORA_ADAPTERS is {most}."
        raise Fault(507, "too_many_adapters", f"{loaded} Unload one, or raise it.")


def _copy(folder: Path) -> str:
    """Return a copy of an adapter's folder. Raises Fault: 400 if it has links to files outside, or
    too many files; 507 without space."""
    root = folder.resolve()
    paths = [path for path in root.rglob("*") if path.is_file()]
    outside = [path for path in paths if not path.resolve().is_relative_to(root)]
    if outside or len(paths) > _MOST_FILES:
        what = f"{outside[0].name}, a link to a file outside" if outside else f"{len(paths)} files"
        raise bad_request(f"{folder} has {what}. Give the folder that peft wrote.")
    copy = tempfile.mkdtemp(prefix="amphora-adapter-")
    try:
        shutil.copytree(root, copy, dirs_exist_ok=True)
    except OSError as error:
        shutil.rmtree(copy, ignore_errors=True)
        raise Fault(507, "not_copied", f"{folder} cannot be copied: {error}.") from error
    return copy
