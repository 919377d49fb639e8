"""Computes the SM_* variables and the arguments of a training script.

sagemaker-training's own `environment` creates folders, needs a compiled extension and overwrites
variables. A test compares both on generated configurations, and lists what differs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from typing import Any

from amphora.common.devices import CUDA, Devices
from amphora.common.errors import ConfigError
from amphora.contract.job import UNPREFIXED_KEYS, Job, to_argument

# The platform's keys that are not `framework_params`.
_CORE_KEYS = UNPREFIXED_KEYS | {
    "sagemaker_program",
    "sagemaker_submit_directory",
    "sagemaker_enable_cloudwatch_metrics",
    "sagemaker_region",
    "sagemaker_container_log_level",
    "sagemaker_job_name",
    "sagemaker_s3_output",
}
_DISTRIBUTION_KEYS = (
    "sagemaker_torch_distributed_enabled",
    "sagemaker_distributed_dataparallel_enabled",
    "sagemaker_pytorch_ddp_enabled",
    "sagemaker_mpi_enabled",
    "sagemaker_parameter_server_enabled",
    "sagemaker_pytorch_xla_multi_worker_enabled",
    "sagemaker_multi_worker_mirrored_strategy_enabled",
)
MASTER_PORT = 7777
# Linux's MAX_ARG_STRLEN: one variable or argument, with its closing NUL, is at most 128 KiB.
_LONGEST_STRING = 128 * 1024 - 1


def sm_variables(job: Job, devices: Devices, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the SM_* variables of `job`, and the few without prefix that toolkits set."""
    settings = _settings(job, devices, environ)
    groups = settings["distribution_instance_groups"]
    values = dict(settings)
    values |= {f"channel_{name}": str(path) for name, path in job.channels.items()}
    values |= {f"hp_{name}": value for name, value in job.arguments.items()}
    renamed = {"hps", "framework_params", "channels", "user_args"}
    values["training_env"] = {
        **{name: value for name, value in settings.items() if name not in renamed},
        "hyperparameters": job.hyperparameters,
        "additional_framework_parameters": settings["framework_params"],
        "channel_input_dirs": {name: str(path) for name, path in job.channels.items()},
        "distribution_hosts": list(job.hosts) if groups or not job.instance_groups else [],
        "is_master": job.current_host == job.hosts[0],
        "is_modelparallel_enabled": job.hyperparameters.get("mp_parameters", {}) != {},
        "is_smddprun_installed": shutil.which("smddprun") is not None,
        "is_smddpmprun_installed": shutil.which("smddpmprun") is not None,
        "job_name": environ.get("TRAINING_JOB_NAME"),
        "master_hostname": job.hosts[0],
        "topology": job.resource_config.get("topology", []),
    }
    # The names that SDK v3's driver adds, so that scripts find them in every job.
    values |= {
        "input_data_dir": str(job.paths.data),
        "output_failure": str(job.paths.failure),
        "host_count": len(job.hosts),
        "current_host_rank": job.hosts.index(job.current_host),
        "master_addr": job.hosts[0],
        "master_port": MASTER_PORT,
        "source_dir": job.submit_directory if job.entry_point else None,
        "entry_script": job.entry_point,
    }
    # First, since another hyperparameter or channel may have this name.
    exported = [(plain(name), value) for name, value in values.items() if name != plain(name)]
    names = [*exported, *values.items()]
    variables = {f"SM_{name.upper()}": to_text(value) for name, value in names}
    region = job.sagemaker.get("sagemaker_region") or environ.get(
        "AWS_REGION", environ.get("AWS_DEFAULT_REGION", "")
    )
    return variables | {
        "CURRENT_HOST": job.current_host,
        "SAGEMAKER_REGION": to_text(region),
        "SAGEMAKER_JOB_NAME": to_text(job.sagemaker.get("sagemaker_job_name")),
        "MASTER_ADDR": job.hosts[0] if len(job.hosts) > 1 else "127.0.0.1",
        "MASTER_PORT": str(MASTER_PORT),
    }


def select_fitting(job: Job, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are short enough for Linux (E2BIG).

    Raises ConfigError if a hyperparameter is too long, since it cannot be an argument either.
    """
    kept = {
        name: value
        for name, value in variables.items()
        if len(os.fsencode(f"{name}={value}")) <= _LONGEST_STRING
    }
    sizes = [
        f"{name} ({len(os.fsencode(to_argument(value))):,} bytes)"
        for name, value in job.arguments.items()
        if f"SM_HP_{name.upper()}" in variables.keys() - kept.keys()
    ]
    if sizes:
        raise ConfigError(
            f"Larger than the 128 KiB that Linux allows for one argument: {', '.join(sizes)}.",
            "Put the value into a file of a channel, and pass the file's name.",
        )
    return kept


def _settings(job: Job, devices: Devices, environ: Mapping[str, str]) -> dict[str, Any]:
    paths, groups = job.paths, job.instance_groups
    current_group = groups.get(job.instance_group, {})
    is_distributed = any(job.wants(key) for key in _DISTRIBUTION_KEYS)
    settings: dict[str, Any] = {
        "hosts": list(job.hosts),
        "network_interface_name": job.network_interface,
        "hps": job.hyperparameters,
        "user_entry_point": job.entry_point,
        "framework_params": {
            key: value for key, value in job.sagemaker.items() if key not in _CORE_KEYS
        },
        "resource_config": job.resource_config,
        "input_data_config": job.input_data_config,
        "output_data_dir": str(paths.output_data),
        "channels": sorted(job.channels),
        "current_host": job.current_host,
        "current_instance_type": job.resource_config.get("current_instance_type", "local"),
        "current_instance_group": job.instance_group,
        "current_instance_group_hosts": current_group.get("hosts", []),
        "instance_groups": list(groups),
        "instance_groups_dict": groups,
        "distribution_instance_groups": [job.instance_group] if is_distributed else [],
        "is_hetero": False,
        "module_name": (job.entry_point or "").removesuffix(".py"),
        "log_level": job.log_level,
        "framework_module": environ.get("SAGEMAKER_TRAINING_MODULE"),
        "input_dir": str(paths.input),
        "input_config_dir": str(paths.config),
        "output_dir": str(paths.output),
        "num_cpus": os.cpu_count(),
        "num_gpus": devices.accelerators if devices.kind == CUDA else 0,
        "num_neurons": devices.neuron_cores,
        "model_dir": str(paths.model),
        "module_dir": job.submit_directory,
        "user_args": to_arguments(job.arguments),
        "output_intermediate_dir": str(paths.output_intermediate),
    }
    topology = job.resource_config.get("topology")
    return settings | ({"topology": topology} if topology else {})


def plain(name: str) -> str:
    """Return a name that a shell can export: SM_CHANNEL_MY_DATA for SM_CHANNEL_MY-DATA."""
    return re.sub(r"[^A-Za-z0-9_]", "_", name)


def to_text(value: Any) -> str:
    """Encode a value for an SM_* variable: strings unchanged, None empty, else compact JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def to_arguments(arguments: Mapping[str, Any]) -> list[str]:
    """Return `--key value` for each hyperparameter, sorted; `-k value` for one letter."""
    argv: list[str] = []
    for key in sorted(arguments):
        argv += [f"--{key}" if len(key) > 1 else f"-{key}", to_argument(arguments[key])]
    return argv
