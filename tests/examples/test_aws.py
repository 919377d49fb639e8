"""The policies, templates and recipes of examples/aws, and the commands of docs/SETUP.md."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import botocore.session
import pytest
import yaml
from botocore import xform_name

from tests.support.sdk_environments import sdk_python

from .aws import SAGEMAKER
from .conftest import ROOT
from .iam import POLICIES, as_list, is_allowed, read_policy

ACCOUNT, REGION = "123456789012", "eu-west-1"
BUCKET = f"arn:aws:s3:::sagemaker-{REGION}-{ACCOUNT}"
PAGE = (ROOT / "docs" / "SETUP.md").read_text()
KEY = f"arn:aws:kms:{REGION}:{ACCOUNT}:key/0123"
CAMEL = re.compile(r"(?:^|-)(\w)")
OURS = {"kms:ResourceAliases": ["alias/amphora"]}
GRANT = {**OURS, "kms:GrantIsForAWSResource": True}


def _upper(match: re.Match[str]) -> str:
    return match[1].upper()


class Template(yaml.SafeLoader):
    """A reader of CloudFormation's YAML: `!Sub` gives its text for the account and region of the policies."""


def _function(loader: Template, suffix: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.ScalarNode):
        text = loader.construct_scalar(node)
        names = {"AccountId": ACCOUNT, "Region": REGION, "Partition": "aws"}
        if suffix == "Ref":
            return names.get(text.removeprefix("AWS::"), text)
        return re.sub(r"\$\{AWS::(\w+)\}", lambda name: names[name[1]], text)
    assert isinstance(node, yaml.SequenceNode)
    return {suffix: loader.construct_sequence(node, deep=True)}


Template.add_multi_constructor("!", _function)


def resources(name: str) -> dict[str, Any]:
    """Return the properties of a template's resources."""
    template = yaml.load((POLICIES / name).read_text(), Template)
    return {key: value["Properties"] for key, value in template["Resources"].items()}


@pytest.mark.parametrize(
    ("action", "resource", "context", "allowed"),
    [
        ("ecr:BatchGetImage", f"arn:aws:ecr:{REGION}:{ACCOUNT}:repository/amphora", {}, True),
        ("ecr:BatchGetImage", f"arn:aws:ecr:{REGION}:{ACCOUNT}:repository/other", {}, False),
        ("logs:PutLogEvents", f"arn:aws:logs:{REGION}:{ACCOUNT}:log-group:/aws/sagemaker/TrainingJobs:log-stream:job/algo-1", {}, True),
        ("s3:GetObject", f"{BUCKET}/reviews/train/rows.csv", {}, True),
        ("s3:PutObject", f"{BUCKET}/checkpoints/1/checkpoint-4/optimizer.bin", {}, True),
        ("s3:ListBucket", BUCKET, {}, True),
        ("s3:DeleteBucket", BUCKET, {}, False),
        ("s3:GetObject", "arn:aws:s3:::other/rows.csv", {}, False),
        ("kms:GenerateDataKey", KEY, OURS, True),
        ("kms:Decrypt", KEY, {}, False),
        ("kms:CreateGrant", KEY, GRANT, True),
        ("kms:CreateGrant", KEY, OURS, False),
        ("sagemaker-mlflow:LogMetric", f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:mlflow-app/app-A", {}, True),
        ("sagemaker:AccessModelPackage", f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:model-package/reviews/3", {}, True),
        ("secretsmanager:GetSecretValue", f"arn:aws:secretsmanager:{REGION}:{ACCOUNT}:secret:amphora/hf-token-a1B2c3", {}, True),
        ("secretsmanager:GetSecretValue", f"arn:aws:secretsmanager:{REGION}:{ACCOUNT}:secret:db-a1B2c3", {}, False),
        ("codeartifact:GetAuthorizationToken", f"arn:aws:codeartifact:{REGION}:{ACCOUNT}:domain/team", {}, True),
        ("codeartifact:GetRepositoryEndpoint", f"arn:aws:codeartifact:{REGION}:{ACCOUNT}:repository/team/pypi", {}, True),
        ("sts:GetServiceBearerToken", "*", {"sts:AWSServiceName": "codeartifact.amazonaws.com"}, True),
        ("iam:PassRole", f"arn:aws:iam::{ACCOUNT}:role/SageMakerRole", {}, False),
        ("sagemaker:CreateTrainingJob", "*", {}, False),
    ],
)  # fmt: skip
def test_a_job_may_do_what_it_needs_and_no_more(
    action: str, resource: str, context: dict[str, Any], allowed: bool
) -> None:
    assert is_allowed(read_policy("execution_role.json"), action, resource, context) is allowed


def test_the_templates_hold_the_policies_of_the_files() -> None:
    stack, release = resources("stack.yaml"), resources("release.yaml")
    (policy,) = stack["Role"]["Policies"]
    assert policy["PolicyDocument"]["Statement"] == read_policy("execution_role.json")
    assert stack["Role"]["AssumeRolePolicyDocument"]["Statement"] == read_policy("trust.json")
    lifecycle = stack["Repository"]["LifecyclePolicy"]["LifecyclePolicyText"]
    assert json.loads(lifecycle) == json.loads((POLICIES / "lifecycle.json").read_text())
    pushing, push = release["Release"]["PolicyDocument"]["Statement"], read_policy("push.json")
    assert pushing[: len(push)] == push
    names = [stack["Role"]["RoleName"], stack["Repository"]["RepositoryName"]]
    assert names == ["SageMakerRole", "amphora"]
    assert BUCKET.endswith(f":{stack['Bucket']['BucketName']}")


def test_the_page_names_every_statement_of_the_role() -> None:
    rows = re.findall(r"^\| (`[^|]*`) \|", PAGE, re.M)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert named == [statement["Sid"] for statement in read_policy("execution_role.json")]


def test_a_caller_may_do_what_the_guides_request() -> None:
    pages = [(ROOT / "docs" / f"{name}.md").read_text() for name in ("ENDPOINTS", "ESTIMATORS")]
    text = "\n".join(pages)
    named = set(re.findall(r"<!-- (?:request|sdk3): (\w+)", text)) | set(
        re.findall(r"`(\w+)`", text)
    )
    operations = sorted(named & set(SAGEMAKER.operation_names) | {"InvokeEndpoint"})
    assert len(operations) > 5
    statements, resource = read_policy("caller.json"), f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:a/b"
    denied = [
        name for name in operations if not is_allowed(statements, f"sagemaker:{name}", resource)
    ]
    assert not denied


def wrong_commands(calls: list[list[str]]) -> list[str]:
    """Return what is wrong with calls of the AWS CLI: its commands and options are the operations and
    parameters of botocore's models, but for those of its own."""
    particular = {
        ("cloudformation", "deploy"): {"stack_name", "template_file", "capabilities", "parameter_overrides"},
        ("s3", "cp"): {"only_show_errors"},
        ("configure", "get"): set(),
        ("ecr", "get-login-password"): set(),
    }  # fmt: skip
    session = botocore.session.get_session()
    wrong = []
    for service, operation, *options in calls:
        command = f"{service} {operation}"
        given = {option[2:].replace("-", "_") for option in options if option[:2] == "--"}
        given -= {"query", "output", "region", "cli_binary_format"}
        if (service, operation) in particular:
            wrong += [f"{command}: {name}" for name in given - particular[service, operation]]
            continue
        model = session.get_service_model(service)
        name = operation.replace("-", "_")
        if operation == "wait":
            waiter = session.get_waiter_model(service).get_waiter(CAMEL.sub(_upper, options[0]))
            name = xform_name(waiter.operation)
        methods = [method for method in model.operation_names if xform_name(method) == name]
        if not methods:
            wrong.append(f"{command}: unknown")
            continue
        shape = model.operation_model(methods[0]).input_shape
        known = {xform_name(member) for member in shape.members} if shape else set()
        required = {xform_name(member) for member in shape.required_members} if shape else set()
        wrong += [f"{command}: {name} is unknown" for name in given - known]
        wrong += [f"{command}: {name} is missing" for name in required - given]
    return wrong


ANSWERS = """case "$*" in
    *get-caller-identity*) echo 123456789012 ;;
    "configure get region") echo eu-west-1 ;;
    *get-login-password* | *get-secret-value*) echo secret ;;
    *describe-image-scan-findings*) echo "${CRITICAL:-None}" ;;
    *describe-images*) echo sha256:0123 ;;
esac"""
DOCKER = """case "$1" in
    --version) echo "Docker version 20.10.24" ;;
    inspect) echo '["amphora"] ["train"]' ;;
    login) cat >/dev/null ;;
    run) echo torch==2.14.0 ;;
esac"""
VENV = (
    'mkdir -p "$3/bin"; for tool in pip pip-audit python; do cp "$TOOLS/tool" "$3/bin/$tool"; done'
)
TOOLS = {
    "aws": ANSWERS, "docker": DOCKER, "python3": VENV, "python": "",
    "tool": 'case "$0" in *python) test -z "${JOB_FAILS-}";; esac',
}  # fmt: skip


@dataclass
class Bench:
    """Runs scripts with stand-ins for what they call, which write their arguments down."""

    folder: Path

    def __post_init__(self) -> None:
        (self.folder / "tools").mkdir()
        for name, body in TOOLS.items():
            tool = self.folder / "tools" / name
            # One write for each call: the ends of a pipe run at the same time.
            words = """line=$(printf '%s\\037' "${0##*/}" "$@" | tr '\\n' ' ')"""
            write = f"""{words}; printf '%s\\n' "$line" >>"$CALLS\""""
            tool.write_text(f"#!/bin/sh\n{write}\n{body}\n")
            tool.chmod(0o755)

    def run(
        self, command: list[Any], cwd: Path, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        tools = str(self.folder / "tools")
        environ = {
            "PATH": f"{tools}:{os.environ['PATH']}", "TOOLS": tools, "CALLS": str(self.folder / "calls"),
            "AWS_REGION": REGION, **variables,
        }  # fmt: skip
        return subprocess.run(command, env=environ, cwd=cwd, text=True, capture_output=True)

    def calls(self, name: str) -> list[list[str]]:
        """Return the arguments of each call of a program."""
        lines = [
            line.split("\037")[:-1] for line in (self.folder / "calls").read_text().splitlines()
        ]
        return [words for tool, *words in lines if tool == name]

    def order(self) -> list[str]:
        return [
            line.replace("\037", " ") for line in (self.folder / "calls").read_text().splitlines()
        ]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def release(bench: Bench, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run release.sh for the image `cpu` in a checkout of its own."""
    checkout = bench.folder / "checkout"
    (checkout / "examples" / "aws").mkdir(parents=True)
    (checkout / "examples" / "aws" / "release.sh").symlink_to(POLICIES / "release.sh")
    for entry in ROOT.iterdir():
        if entry.name not in (".git", "build", "examples"):
            (checkout / entry.name).symlink_to(entry)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], cwd=checkout, check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "."], cwd=checkout, check=True)
    script = ["bash", checkout / "examples" / "aws" / "release.sh", "cpu"]
    role = f"arn:aws:iam::{ACCOUNT}:role/SageMakerRole"
    return bench.run(script, checkout, ROLE=role, BUCKET="a-bucket", **variables)


def test_the_commands_of_the_page_are_those_of_the_services(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.S)
    assert len(blocks) == PAGE.count("```") // 2
    names = {name: f"{name.lower()}-1" for name in ("VPC", "TABLE", "SUBNET", "GROUP")}
    done = bench.run(["bash", "-euc", "\n".join(blocks)], ROOT, **names)
    assert done.returncode == 0, done.stderr
    calls = bench.calls("aws")
    assert len(calls) == len(re.findall(r"\baws (?!CLI)[a-z0-9-]+ [a-z-]+", "\n".join(blocks)))
    assert wrong_commands(calls) == []
    given = [
        words[words.index(name) + 1]
        for words in calls
        for name in words
        if name.endswith("-document")
    ]
    assert [json.loads(text)["Statement"] for text in given] == [
        read_policy(name)
        for name in ("trust.json", "execution_role.json", "caller.json", "push.json")
    ]
    assert wrong_commands(
        [["ecr", "describe-image"], ["ecr", "describe-images", "--repository"]]
    ) == [
        "ecr describe-image: unknown",
        "ecr describe-images: repository is unknown",
        "ecr describe-images: repository_name is missing",
    ]


def test_a_release_builds_audits_pushes_scans_and_trains(bench: Bench) -> None:
    done = release(bench)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/amphora@sha256:0123\n"
    order = (
        "docker build",
        "pip-audit",
        "docker push",
        "aws ecr wait",
        "aws s3 cp",
        "python examples",
    )
    calls = bench.order()
    first = [next(i for i, call in enumerate(calls) if call.startswith(name)) for name in order]
    assert first == sorted(first)
    ((script, *job),) = bench.calls("python")
    assert script == "examples/train_boto3.py" and "ml.m5.xlarge" in job
    assert job[job.index("--image") + 1] == done.stdout.strip()
    assert wrong_commands(bench.calls("aws")) == []


@pytest.mark.parametrize(
    ("variables", "trains", "message"),
    [
        ({"CRITICAL": "2"}, False, "has 2 critical findings"),
        ({"JOB_FAILS": "1"}, True, "a small job on ml.m5.xlarge"),
    ],
)
def test_a_release_ends_with_what_failed(
    bench: Bench, variables: dict[str, str], trains: bool, message: str
) -> None:
    done = release(bench, **variables)
    assert done.returncode == 1 and not done.stdout
    assert message in done.stderr
    assert bool(bench.calls("python")) is trains


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_the_recipes_run_the_release() -> None:
    workflow = yaml.safe_load((POLICIES / "github.yml").read_text())
    assert workflow["permissions"] == {"contents": "read", "id-token": "write"}
    steps = workflow["jobs"]["image"]["steps"]
    for step in steps:
        assert "uses" not in step or re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", step["uses"])
    # Without bash, the status of a pipe is that of its end.
    assert steps[-1]["shell"] == "bash"
    specification = yaml.safe_load(resources("release.yaml")["Project"]["Source"]["BuildSpec"])
    assert str(specification["version"]) == "0.2" and list(specification["phases"]) == ["build"]
    lines = [*specification["phases"]["build"]["commands"], steps[-1]["run"]]
    assert all(line.startswith('examples/aws/release.sh "$KIND"') for line in lines)
    for script in [*lines, *(step["run"] for step in steps if "run" in step)]:
        checked = subprocess.run(
            ["shellcheck", "-s", "bash", "-"], input=script, text=True, capture_output=True
        )
        assert checked.returncode == 0, checked.stdout


@pytest.fixture(scope="session")
def linters() -> Path:
    return Path(sdk_python("cloud")).parent


def lint(linters: Path, *templates: Path) -> str:
    """Return what cfn-lint finds in templates, warnings included."""
    command = [linters / "cfn-lint", "--regions", REGION, "--template", *templates]
    done = subprocess.run(command, text=True, capture_output=True)
    return done.stdout + done.stderr


@pytest.mark.heavy
def test_templates_and_policies_hold_to_the_schemas(linters: Path, tmp_path: Path) -> None:
    """CloudFormation's schemas also hold policies; cfn-lint knows the actions of each service."""
    policies = {path.name: json.loads(path.read_text()) for path in POLICIES.glob("*.json")}
    assert len(policies) == 7
    repository = {
        "LifecyclePolicy": {"LifecyclePolicyText": json.dumps(policies.pop("lifecycle.json"))},
        "RepositoryPolicyText": policies.pop("pull_from_account.json"),
    }
    trust = policies.pop("trust.json")
    made = {
        "Repository": {"Type": "AWS::ECR::Repository", "Properties": repository, "DeletionPolicy": "Retain", "UpdateReplacePolicy": "Retain"},
        "Role": {"Type": "AWS::IAM::Role", "Properties": {"AssumeRolePolicyDocument": trust}},
    }  # fmt: skip
    for number, policy in enumerate(policies.values()):
        made[f"Policy{number}"] = {
            "Type": "AWS::IAM::ManagedPolicy",
            "Properties": {"PolicyDocument": policy},
        }
    template = tmp_path / "policies.json"
    template.write_text(json.dumps({"Resources": made}))
    assert lint(linters, POLICIES / "stack.yaml", POLICIES / "release.yaml", template) == ""
    wrong = template.read_text().replace(
        "sagemaker:CreateTrainingJob", "sagemaker:CreateTraningJob"
    )
    template.write_text(wrong)
    assert "createtraningjob" in lint(linters, template)


@pytest.mark.heavy
def test_workflows_hold_to_their_schema(linters: Path) -> None:
    workflows = [POLICIES / "github.yml", *(ROOT / ".github" / "workflows").glob("*.yml")]
    command = [
        linters / "check-jsonschema",
        "--builtin-schema",
        "vendor.github-workflows",
        *workflows,
    ]
    done = subprocess.run(command, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.heavy
def test_sdk_v3_accepts_the_role_and_refuses_one_without_subnets() -> None:
    """Its check simulates the policy without resources and conditions."""
    program = (
        "import json\nfrom sagemaker.core.helper.iam_role_resolver import _get_smoke_test_actions as actions, resolve_and_validate_role\n"
        "from sagemaker.train.defaults import DEFAULT_MAX_RUNTIME_IN_SECONDS as seconds\n"
        "print(json.dumps([seconds, actions('training'), actions('serving')]))"
    )
    done = subprocess.run([sdk_python("sdk3"), "-c", program], text=True, capture_output=True)
    seconds, *of_types = json.loads(done.stdout.splitlines()[-1])
    assert seconds == 3600 and "ends after 1 hour" in PAGE
    role = read_policy("execution_role.json")
    assert all(is_allowed(role, action) for actions in of_types for action in actions)
    narrow = [statement for statement in role if statement["Sid"] != "Vpc"]
    denied = [action for action in of_types[0] if not is_allowed(narrow, action)]
    assert len(denied) == 9 and "ec2:CreateNetworkInterface" in denied
    assert "eight others" in PAGE


def test_each_policy_allows_only_and_names_each_action_once() -> None:
    for path in POLICIES.glob("*.json"):
        statements = json.loads(path.read_text()).get("Statement", [])
        actions = [action for statement in statements for action in as_list(statement["Action"])]
        assert len(actions) == len(set(actions)), path.name
        assert {statement["Effect"] for statement in statements} <= {"Allow"}
