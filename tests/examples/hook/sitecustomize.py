"""For an example's process: every AWS client talks to AWS_ENDPOINT_URL, also where an SDK names
another address, waits between two looks at a job are short, and the SDKs do not check the schema of
their own configuration again for every value that they look up in it, which takes most of their time."""

import contextlib
import os
import time

import botocore.session

create_client = botocore.session.Session.create_client
sleep = time.sleep


def redirected(self, *args, **kwargs):
    return create_client(self, *args, **kwargs | {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]})


botocore.session.Session.create_client = redirected
time.sleep = lambda seconds: sleep(min(seconds, 0.1))

with contextlib.suppress(ImportError):
    from jsonschema import Draft202012Validator

    Draft202012Validator.check_schema = classmethod(lambda *_, **__: None)
