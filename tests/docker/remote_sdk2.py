"""A function that SDK v2 runs as a training job: `submit IMAGE ROLE`, then `result JOB`."""

from __future__ import annotations

import sys

from sagemaker.remote_function import RemoteExecutor
from sagemaker.remote_function.client import get_future


def halves(numbers: list[int]) -> dict[str, object]:
    import transformers

    halved = [number / 2 for number in numbers]
    return {"halves": halved, "transformers": transformers.__version__}


if sys.argv[1] == "submit":
    settings = {"image_uri": sys.argv[2], "role": sys.argv[3], "instance_type": "ml.m5.large"}
    # The job is not run by the stand-in for AWS, which calls it completed: there is no result yet.
    with RemoteExecutor(**settings) as executor:
        executor.submit(halves, [1, 2])
else:
    print(get_future(sys.argv[2]).result())
