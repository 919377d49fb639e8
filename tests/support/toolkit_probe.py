"""Run by test_environment in its own process: sagemaker-training's view of jobs, a JSON line each."""

import json
import logging
import os
import sys

logging.disable(logging.CRITICAL)


def main() -> None:
    from sagemaker_training import environment

    for line in sys.stdin:
        request = json.loads(line)
        for name in ("SAGEMAKER_PROGRAM", "SAGEMAKER_SUBMIT_DIRECTORY", "TRAINING_JOB_NAME"):
            os.environ.pop(name, None)
        os.environ.update(request["environ"])
        view = environment.Environment()
        reply = {"variables": view.to_env_vars(), "argv": view.to_cmd_args()}
        print(json.dumps(reply), flush=True)


main()
