"""AWS, as far as the examples ask for it: a server that writes requests down and answers each with
the least that botocore's service model allows, every job completed and every endpoint in service.

`violations` holds a request to the service model more strictly than botocore does before sending:
enumerations, patterns and upper bounds count too. A call that examples/aws/caller.json does not allow is
answered by AccessDenied, and kept in `refused`.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import botocore.session
from botocore.model import ServiceModel, Shape

from tests.support import http_server

from .iam import is_allowed, read_policy

ACCOUNT = "123456789012"
CALLER = read_policy("caller.json")
# What any identity may do.
FREE = ("sts:GetCallerIdentity",)
ANSWER = [{"label": "incident", "score": 0.9}]
OUTPUT = "async/output.json"
STATUS = {
    "TrainingJobStatus": "Completed",
    "SecondaryStatus": "Completed",
    "EndpointStatus": "InService",
    "TransformJobStatus": "Completed",
    "HyperParameterTuningJobStatus": "Completed",
    "InferenceComponentStatus": "InService",
}
RESULTS = {
    "ModelArtifacts": {"S3ModelArtifacts": "s3://bucket/models/model.tar.gz"},
    "BestTrainingJob": {
        "TrainingJobName": "best",
        "TrainingJobArn": f"arn:aws:sagemaker:eu-west-1:{ACCOUNT}:training-job/best",
        "CreationTime": 1,
        "TrainingJobStatus": "Completed",
        "TunedHyperParameters": {"learning_rate": "5e-05"},
        "ObjectiveStatus": "Succeeded",
    },
}
XML = '<?xml version="1.0"?>'
STS = f"""{XML}<GetCallerIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<GetCallerIdentityResult><Arn>arn:aws:iam::{ACCOUNT}:user/me</Arn><UserId>me</UserId>
<Account>{ACCOUNT}</Account></GetCallerIdentityResult></GetCallerIdentityResponse>"""
BUCKETS = f"""{XML}<ListAllMyBucketsResult><Buckets><Bucket><Name>sagemaker-eu-west-1-{ACCOUNT}</Name>
<CreationDate>2026-01-01T00:00:00.000Z</CreationDate></Bucket></Buckets></ListAllMyBucketsResult>"""
NO_IAM = f"""{XML}<ErrorResponse xmlns="https://iam.amazonaws.com/doc/2010-05-08/"><Error>
<Type>Sender</Type><Code>AccessDenied</Code><Message>not yours</Message></Error></ErrorResponse>"""


def service_model(name: str) -> ServiceModel:
    return botocore.session.get_session().get_service_model(name)


SAGEMAKER = service_model("sagemaker")
SERVICES = {
    service.metadata["targetPrefix"]: service
    for service in (
        SAGEMAKER,
        service_model("application-autoscaling"),
        service_model("cloudwatch"),
    )
}


def least(shape: Shape) -> Any:
    """A value of `shape` with its required members only."""
    kind = shape.type_name
    if kind == "structure":
        return {name: least(shape.members[name]) for name in shape.required_members}
    if kind in ("list", "map"):
        return [] if kind == "list" else {}
    if kind == "string":
        return shape.enum[0] if shape.enum else "x" * shape.metadata.get("min", 1)
    return {"boolean": False}.get(kind, 1)


def violations(shape: Shape, value: Any, path: str = "") -> Iterator[str]:
    """What the service model forbids in `value`, a request's JSON."""
    kind, limits = shape.type_name, shape.metadata
    python = {"structure": dict, "map": dict, "list": list, "string": str, "boolean": bool}
    expected = python.get(kind, (int, float))
    if not isinstance(value, expected):
        yield f"{path}: {value!r} is no {kind}"
        return
    size = value if kind in ("integer", "long", "float", "double") else None
    size = len(value) if isinstance(value, (str, list, dict)) and kind != "structure" else size
    if size is not None and not limits.get("min", size) <= size <= limits.get("max", size):
        yield f"{path}: {value!r} is not within {limits.get('min')} and {limits.get('max')}"
    if kind == "structure":
        yield from (
            f"{path}.{name}: missing" for name in shape.required_members if name not in value
        )
        for name, member in value.items():
            if name not in shape.members:
                yield f"{path}.{name}: unknown"
            else:
                yield from violations(shape.members[name], member, f"{path}.{name}")
    elif kind == "list":
        for position, member in enumerate(value):
            yield from violations(shape.member, member, f"{path}[{position}]")
    elif kind == "map":
        for name, member in value.items():
            yield from violations(shape.key, name, f"{path} key")
            yield from violations(shape.value, member, f"{path}[{name}]")
    elif kind == "string":
        if shape.enum and value not in shape.enum:
            yield f"{path}: {value!r} is none of {shape.enum}"
        if "pattern" in limits and not re.fullmatch(python_pattern(limits["pattern"]), value):
            yield f"{path}: {value!r} does not match {limits['pattern']}"


def python_pattern(java: str) -> str:
    r"""Python's re has no \p{...}: letters, separators and digits by their nearest classes; and
    none of Java's pairs for what lies beyond \uFFFF."""
    java = java.replace(r"\p{Print}", "[ -~]")
    java = java.replace(r"\uD800\uDC00-\uDBFF\uDFFF", r"\U00010000-\U0010FFFF")
    java = re.sub(r"\\p\{(Zs?)\}", r"\\s", java).replace(r"\p{N}", r"\d")
    return re.sub(r"\\p\{[PSM]\}", r"\\W", java).replace(r"\p{L}", r"\w")


@dataclass
class Aws:
    """What was asked, what is in S3, and what was created before."""

    url: str = ""
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    before: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def authorize(self, action: str, resource: str, **context: str) -> None:
        """Raise PermissionError unless the caller's policy allows `action` on the resource, an ARN's end
        (`s3:::bucket`, `training-job/name`) or `*`."""
        service = action.partition(":")[0]
        if resource != "*" and not resource.startswith(service):
            resource = f"{service}:eu-west-1:{ACCOUNT}:{resource}"
        arn = resource if resource == "*" else f"arn:aws:{resource}"
        if action in FREE or is_allowed(CALLER, action, arn, context):
            return
        self.refused.append(f"{action} on {arn}")
        raise PermissionError(self.refused[-1])

    def authorize_operation(self, service: str, operation: str, params: dict[str, Any]) -> None:
        """Raise PermissionError unless an operation of SageMaker, its scaling or alarms is allowed, and the
        passing of the role that it names."""
        # Lists of resources have no resource; each other operation has one, by whatever name.
        resource = {
            "cloudwatch": "alarm:a-name",
            "application-autoscaling": "scalable-target/1",
        }.get(service, "a-resource/a-name")
        self.authorize(f"{service}:{operation}", "*" if operation.startswith("List") else resource)
        for name in ("RoleArn", "ExecutionRoleArn"):
            if role := params.get(name):
                passed = {"iam:PassedToService": f"{service}.amazonaws.com"}
                self.authorize("iam:PassRole", role.removeprefix("arn:aws:"), **passed)

    def request_of(self, operation: str) -> dict[str, Any]:
        """The parameters of the one request for `operation`."""
        results = [params for name, params in self.requests if name == operation]
        assert len(results) == 1, (
            f"{operation}: {results}; asked: {[name for name, _ in self.requests]}"
        )
        return results[0]

    def answer(
        self, operation: str, params: dict[str, Any], service: ServiceModel = SAGEMAKER
    ) -> dict[str, Any]:
        model = service.operation_model(operation)
        wrong = [*violations(model.input_shape, params, operation)] if model.input_shape else []
        self.requests.append((operation, params))
        if wrong:
            raise ValueError("; ".join(wrong))
        if model.output_shape is None:
            return {}
        answer = least(model.output_shape)
        if operation == "StartPipelineExecution":
            answer["PipelineExecutionArn"] = f"{params['PipelineName']}/execution/1"
        if operation == "ListModelPackages":
            answer["ModelPackageSummaryList"] = self.packages(**params)
        if operation.startswith("Describe"):
            created = operation.replace("Describe", "Create")
            requests = [params for name, params in self.before + self.requests if name == created]
            for known in (*requests, STATUS, RESULTS):
                answer |= {k: v for k, v in known.items() if k in model.output_shape.members}
        return answer

    def packages(self, ModelApprovalStatus: str = "", **_: Any) -> list[dict[str, Any]]:
        """Versions in the Model Registry, the newest first, those of one status or all."""
        numbered = [params for name, params in self.before if name == "CreateModelPackage"]
        status = {
            params["ModelPackageArn"]: params["ModelApprovalStatus"]
            for name, params in self.requests
            if name == "UpdateModelPackage"
        }
        group = f"arn:aws:sagemaker:eu-west-1:{ACCOUNT}:model-package"
        versions = []
        for number, params in enumerate(numbered, 1):
            arn = f"{group}/{params['ModelPackageGroupName']}/{number}"
            now = status.get(arn, params["ModelApprovalStatus"])
            versions.append({
                "ModelPackageArn": arn, "ModelPackageVersion": number, "ModelApprovalStatus": now,
                "ModelPackageStatus": "Completed", "CreationTime": number,
            })  # fmt: skip
        wanted = (
            (ModelApprovalStatus,) if ModelApprovalStatus else ("Approved", "PendingManualApproval")
        )
        return [version for version in versions[::-1] if version["ModelApprovalStatus"] in wanted]

    def s3(self, method: str, path: str, query: dict[str, Any], body: bytes) -> tuple[int, bytes]:
        key = unquote(path.lstrip("/"))
        self.authorize(*s3_action(method, key, query))
        if not key:
            return 200, BUCKETS.encode()
        if "location" in query:
            return 200, f"{XML}<LocationConstraint/>".encode()
        if "list-type" in query:
            prefix = query.get("prefix", [""])[0]
            names = [name.partition("/")[2] for name in self.objects if name.startswith(f"{key}/")]
            listed = [
                f"<Contents><Key>{n}</Key><Size>1</Size></Contents>"
                for n in names
                if n.startswith(prefix)
            ]
            return 200, f"{XML}<ListBucketResult>{''.join(listed)}</ListBucketResult>".encode()
        if method == "PUT":
            self.objects[key] = body
            return 200, b""
        if "/" not in key:
            return 200, b""
        if key not in self.objects:
            return 404, f"{XML}<Error><Code>NoSuchKey</Code></Error>".encode()
        return 200, self.objects[key]

    def runtime(self, path: str, headers: Any, body: bytes) -> tuple[int, dict[str, str], bytes]:
        _, _, endpoint, kind = path.split("/")
        suffix = "Async" if kind == "async-invocations" else ""
        self.authorize(f"sagemaker:InvokeEndpoint{suffix}", f"endpoint/{endpoint}")
        if kind == "async-invocations":
            location = headers["X-Amzn-SageMaker-InputLocation"]
            self.requests.append(
                ("InvokeEndpointAsync", {"EndpointName": endpoint, "InputLocation": location})
            )
            self.objects[f"bucket/{OUTPUT}"] = json.dumps(ANSWER).encode()
            reply = {"X-Amzn-SageMaker-OutputLocation": f"s3://bucket/{OUTPUT}"}
            return 202, reply, b'{"InferenceId": "1"}'
        target = headers.get("X-Amzn-SageMaker-Target-Model")
        component = headers.get("X-Amzn-SageMaker-Inference-Component")
        params = {"EndpointName": endpoint, "Body": json.loads(body)}
        params |= {"InferenceComponentName": component} if component else {}
        self.requests.append(
            ("InvokeEndpoint", params | ({"TargetModel": target} if target else {}))
        )
        return 200, {"Content-Type": "application/json"}, json.dumps(ANSWER).encode()


def s3_action(method: str, key: str, query: dict[str, Any]) -> tuple[str, str]:
    """Return the action of IAM that a request to S3 needs, and its resource.

    Args:
        key: `bucket/name`; `bucket` is short for the bucket of the policies.
    """
    bucket, _, name = key.partition("/")
    bucket = f"sagemaker-eu-west-1-{ACCOUNT}" if bucket == "bucket" else bucket
    if not bucket:
        return "s3:ListAllMyBuckets", "*"
    if name:
        return "s3:GetObject" if method in (
            "GET",
            "HEAD",
        ) else "s3:PutObject", f"s3:::{bucket}/{name}"
    if "location" in query:
        return "s3:GetBucketLocation", f"s3:::{bucket}"
    return "s3:CreateBucket" if method == "PUT" else "s3:ListBucket", f"s3:::{bucket}"


def handler(aws: Aws) -> type[http_server.Quiet]:
    class Handler(http_server.Quiet):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = http_server.read_body(self)
            try:
                self.answer_request(body)
            except PermissionError as error:
                reply = {"__type": "AccessDeniedException", "message": f"AccessDenied: {error}"}
                self.reply(403, json.dumps(reply).encode())

        def answer_request(self, body: bytes) -> None:
            url = urlsplit(self.path)
            service = re.search(r"/([\w-]+)/aws4_request", self.headers.get("Authorization", ""))
            target = self.headers.get("X-Amz-Target", "")
            prefix, _, operation = target.partition(".")
            if prefix in SERVICES:
                name = SERVICES[prefix].service_name
                aws.authorize_operation(name, operation, json.loads(body))
                self.reply_json(lambda: aws.answer(operation, json.loads(body), SERVICES[prefix]))
            elif target.startswith("Logs_"):
                group = json.loads(body).get("logGroupName", "/aws/sagemaker/")
                aws.authorize(f"logs:{operation}", f"log-group:{group}")
                self.reply_json(lambda: {"logStreams": [], "events": []})
            elif service and service[1] == "sts":
                aws.authorize(f"sts:{parse_qs(body.decode())['Action'][0]}", "*")
                self.reply(200, STS.encode())
            elif service and service[1] == "iam":
                params = parse_qs(body.decode())
                role = params.get("RoleName", ["SageMakerRole"])[0]
                aws.authorize(f"iam:{params['Action'][0]}", f"iam::{ACCOUNT}:role/{role}")
                self.reply(403, NO_IAM.encode())
            elif url.path.startswith("/endpoints/"):
                status, headers, answer = aws.runtime(url.path, self.headers, body)
                self.reply(status, answer, headers)
            elif service and service[1] == "s3":
                query = parse_qs(url.query, keep_blank_values=True)
                self.reply(*aws.s3(self.command, url.path, query, body), {"ETag": '"1"'})
            else:
                aws.requests.append((f"unexpected {self.command} {self.path}", {}))
                self.reply(501, b"")

        def reply_json(self, make: Any) -> None:
            kind = {"Content-Type": "application/x-amz-json-1.1"}
            try:
                self.reply(200, json.dumps(make()).encode(), kind)
            except ValueError as error:
                response = {"__type": "ValidationException", "message": str(error)}
                self.reply(400, json.dumps(response).encode(), kind)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer

    return Handler


def serve() -> Iterator[Aws]:
    """Yield a running `Aws`, until the generator is closed."""
    aws = Aws()
    with http_server.running(handler(aws)) as port:
        aws.url = f"http://127.0.0.1:{port}"
        yield aws
