"""A stand-in of neuron-ls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def device(number: int, cores: int, memory: int, **more: Any) -> dict[str, Any]:
    return {
        "neuron_device": number,
        "bdf": f"0000:{number:02x}:00.0",
        "cpu_affinity": "0-7",
        "numa_node": "-1",
        "connected_to": None,
        "nc_count": cores,
        "memory_size": memory,
        "neuroncore_ids": list(range(number * cores, (number + 1) * cores)),
        "neuron_processes": [],
        **more,
    }


def trn1(count: int) -> list[dict[str, Any]]:
    return [device(number, 2, 34359738368) for number in range(count)]


def neuron_ls(folder: Path, script: str) -> dict[str, str]:
    """An environment whose PATH has a neuron-ls that runs `script`."""
    (folder / "neuron-ls").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "neuron-ls").chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def printing(folder: Path, listing: object) -> dict[str, str]:
    (folder / "listing").write_text(json.dumps(listing, indent=4))
    return neuron_ls(folder, f'[ "$*" = -j ] && exec cat {folder}/listing; exit 2')
