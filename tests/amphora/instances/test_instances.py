"""Which instance types fit: decisions that can fail, and the table compared with botocore's lists."""

import csv
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.session
import pytest

from amphora.cli import main
from amphora.common.errors import ConfigError
from amphora.instances import instance_report, prices
from amphora.instances.instance_types import read_table
from amphora.instances.serving_fit import ServingLoad, fit_serving
from amphora.instances.training_fit import TrainingNeeds, fit_training

TABLE = read_table()
TYPES = {instance.name: instance for instance in TABLE.instances}
GB = 10**9


def needs(billions: float = 0.1, batch: float | None = 1, **changes: Any) -> TrainingNeeds:
    """Return the needs of a full training: float32 weights, gradients and moments, and `batch` GB,
    which float32 doubles."""
    weights = int(billions * 4 * GB)

    def step(activations: float | None) -> dict[str, int | None]:
        return {
            "weights": weights, "gradients": weights, "optimizer": 2 * weights,
            "activations": None if activations is None else int(activations * GB),
        }  # fmt: skip

    fields: dict[str, Any] = {
        "memory": {
            f"{kind} {precision}": step(batch and batch * factor)
            for kind in ("cuda", "cpu")
            for precision, factor in (("bfloat16", 1), ("float32", 2))
        },
        "host": weights + GB // 2, "weights": weights, "bf16": None, "needs_gpu": False,
        "use_cpu": False, "is_sharded": False, "processes": 1, "steps": 1000, "samples": 1024,
        "has_max_steps": False, "tokens": 28.0, "matrix_weights": int(0.8 * billions * 1e9),
        "trained_matrix_weights": int(0.8 * billions * 1e9), "generates": False,
    }  # fmt: skip
    return TrainingNeeds(**{**fields, **changes})


def verdict(name: str, wanted: TrainingNeeds) -> str:
    return fit_training(TYPES[name], wanted).verdict


def test_the_table_has_the_types_of_sagemaker() -> None:
    model = botocore.session.get_session().get_service_model("sagemaker")
    training, serving = (
        set(model.shape_for(shape).enum)
        for shape in ("TrainingInstanceType", "ProductionVariantInstanceType")
    )
    supported = {name for name in training | serving if name.split(".")[1] not in TABLE.left_out}
    assert {name for name, one in TYPES.items() if one.trains} == training & supported
    assert {name for name, one in TYPES.items() if one.serves} == serving & supported
    families = {name.split(".")[1] for name in training | serving}
    assert set(TABLE.left_out) <= families, "a family that SageMaker no longer has"


def test_each_device_has_a_source() -> None:
    devices = {instance.device for instance in TABLE.instances}
    assert all(device.source for device in devices)
    for device in devices:
        if device.kind != "cpu":
            assert 15 * GB < device.memory < 300 * GB and device.cores in (1, 2, 4)
            assert device.tflops is None or 50 < device.tflops < 3000


@pytest.mark.parametrize(
    ("name", "billions", "changes", "expected"),
    [
        ("ml.g5.xlarge", 0.1, {}, "yes"),
        ("ml.g5.xlarge", 1.28, {}, "tight"),  # 21.98 of 24 GB
        ("ml.g5.xlarge", 1.5, {}, "no"),
        # Weights, gradients and moments are shared by its 4 GPUs, or not.
        ("ml.g5.12xlarge", 1.5, {}, "no"),
        ("ml.g5.12xlarge", 1.5, {"is_sharded": True}, "yes"),
        # float32, since a T4 has no bfloat16: 2 GB for the batch in place of 1.
        ("ml.g4dn.xlarge", 0.8, {}, "tight"),
        ("ml.g4dn.xlarge", 0.1, {"bf16": True}, "no"),
        ("ml.g5.xlarge", 0.1, {"use_cpu": True}, "no"),
        ("ml.g5.xlarge", 0.1, {"batch": None}, "unknown"),
        ("ml.c7i.xlarge", 0.1, {}, "yes"),
        ("ml.c7i.xlarge", 1.0, {}, "no"),
        ("ml.c7i.xlarge", 0.1, {"needs_gpu": True}, "no"),
        ("ml.c5d.large", 0.1, {}, "no"),  # endpoints only
        ("ml.trn1.2xlarge", 0.1, {}, "unknown"),
        ("ml.trn1.2xlarge", 1.5, {}, "no"),  # 24 of 17.2 GB of a core
    ],
)
def test_what_fits(name: str, billions: float, changes: dict[str, Any], expected: str) -> None:
    assert verdict(name, needs(billions, **changes)) == expected


def test_eight_processes_may_exceed_the_main_memory() -> None:
    assert verdict("ml.g6.48xlarge", needs(1.0)) == "yes"
    fit = fit_training(TYPES["ml.g6.48xlarge"], needs(1.0, host=110 * GB))
    assert (fit.verdict, fit.why) == ("no", "8 processes need 880 of 825 GB RAM")


def test_time_is_told_where_it_was_measured() -> None:
    bert = needs(0.11)  # 0.088 billion weights outside of embeddings
    fit = fit_training(TYPES["ml.p5en.48xlarge"], bert)
    # 1,000 steps of 1,024 texts of 28 tokens, 6 operations for each weight, by 8 H200.
    assert fit.seconds == pytest.approx(1000 * 1024 * 28 * 6 * 0.088e9 / 197e12 / 8, rel=0.01)
    fixed = fit_training(TYPES["ml.p5en.48xlarge"], needs(0.11, has_max_steps=True))
    assert fixed.seconds == pytest.approx(8 * fit.seconds)
    small = fit_training(TYPES["ml.p5en.48xlarge"], needs(0.11, samples=1))
    assert small.seconds == pytest.approx(1000 / 8 * 32 / 1710), "the CPU's time to start kernels"
    assert fit_training(TYPES["ml.p5.48xlarge"], bert).seconds is None
    assert fit_training(TYPES["ml.p5en.48xlarge"], needs(0.11, tokens=None)).seconds is None


def test_an_endpoint_is_counted_by_cpu_time() -> None:
    load = ServingLoad(requests=100, cpu_ms=50)
    fit = fit_serving(TYPES["ml.c7i.xlarge"], needs(0.02), load)
    # 4 vCPUs, used by half, are 40 requests a second.
    assert (fit.rate, fit.count) == (40, 3)
    assert fit_serving(TYPES["ml.c7i.2xlarge"], needs(0.02), load).count == 2
    minilm = needs(0.0227, matrix_weights=10_800_000)
    estimated = ServingLoad(requests=1, tokens=115)
    with_amx, without = (
        fit_serving(TYPES[name], minilm, estimated).cpu_ms for name in ("ml.c7i.xlarge", "ml.c5.xlarge")
    )  # fmt: skip
    assert (with_amx, without) == (pytest.approx(14.5), pytest.approx(47.7))
    assert fit_serving(TYPES["ml.c7i.xlarge"], needs(2.0), load).verdict == "no", "memory"
    generating = needs(0.02, generates=True)
    assert fit_serving(TYPES["ml.c7i.xlarge"], generating, estimated).verdict == "unknown"
    assert fit_serving(TYPES["ml.g5.xlarge"], needs(15.0), load).verdict == "no"
    assert fit_serving(TYPES["ml.g5.xlarge"], needs(1.0), load).verdict == "unknown"


def printed(wanted: TrainingNeeds, question: instance_report.InstanceQuestion) -> list[str]:
    return list(instance_report.answer_question(question, json.dumps(vars(wanted))).lines())


def test_the_report_begins_with_the_smallest_and_is_readable() -> None:
    load = ServingLoad(requests=50)
    lines = printed(needs(0.5), instance_report.InstanceQuestion(load=load))
    assert max(map(len, lines)) <= 100
    # 8 GB, the batch, and half a GB more: 2 vCPUs with 17 GB, and a T4, hold it.
    assert lines[0] == "Training: take ml.r7i.large (CPU) or ml.g4dn.xlarge (GPU)"
    text = "\n".join(lines)
    assert "not measured" in text and "docs/LAB.md" in text and "karpenter" in text
    assert any(line.startswith("no: SageMaker offers it for endpoints only") for line in lines)
    assert sum(line.startswith("ml.g5.") for line in lines) == 1, "one row for a family"
    nothing = printed(needs(500.0), instance_report.InstanceQuestion())
    assert nothing[0] == "Training: no type is known to fit"


def test_prices_decide_if_they_are_known(tmp_path: Path) -> None:
    file = tmp_path / "prices.csv"
    rows = [("type", "price"), ("ml.g6e.xlarge", "0.5"), ("ml.g4dn.xlarge", "2"), ("ml.new.x", "1")]
    with file.open("w") as stream:
        csv.writer(stream).writerows(rows)
    lines = printed(needs(0.5), instance_report.read_question(str(file), None, {}))
    assert lines[0].startswith("Training: take ml.g6e.xlarge (GPU)")
    assert lines[3].endswith(" 0.5") and lines[-1] == f"prices: {file}"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", "ml.g5.xlarge,free\nml.g6.xlarge\ng4,1\n", ["ml.g5.xlarge: 'free'", "ml.g6.xlarge: None", "g4: '1'"]),
        ("a.csv", "", ["it is empty"]),
        ("a.json", '{"ml.g5.xlarge": -1}', ["ml.g5.xlarge: -1"]),
        ("a.json", "[", ["cannot be read"]),
    ],
)  # fmt: skip
def test_wrong_prices(name: str, text: str, says: list[str], tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as raised:
        prices.read_prices(tmp_path / name)
    for part in [*says, "Write lines ml.g5.xlarge,1.41"]:
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--prices", "x.csv"], "it goes with --instances"),
        (["--instances", "--cpu-ms", "3"], "it goes with --requests"),
        (["--instances", "--requests", "-1"], "above 0, not -1"),
        (["--instances", "--steps", "4"], "leave out --instances"),
    ],
)
def test_wrong_arguments(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", *words])
    assert says in capsys.readouterr().err


PRODUCTS = {
    "Training": {"ml.g5.xlarge": "1.408", "ml.g6.xlarge": "0.0000"},
    "Hosting": {"ml.c7i.xlarge": "0.214"},
}


@pytest.fixture
def price_api(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """A server that answers as AWS's price API; yield the requests that it receives."""
    received: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            received.append(request)
            filters = {entry["Field"]: entry["Value"] for entry in request["Filters"]}
            known = PRODUCTS if filters["regionCode"] == "eu-west-1" else {}
            items = [
                json.dumps({
                    "product": {"attributes": {"instanceName": name}},
                    "terms": {"OnDemand": {"x": {"priceDimensions": {"y": {"pricePerUnit": {"USD": usd}}}}}},
                })
                for name, usd in known.get(filters["platoinstancetype"], {}).items()
            ]  # fmt: skip
            body = json.dumps({"FormatVersion": "aws_v1", "PriceList": items}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-amz-json-1.1")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    for name, value in {
        "AWS_ENDPOINT_URL_PRICING": url, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    yield received
    server.shutdown()
    thread.join()
    server.server_close()


def test_prices_of_aws(price_api: list[dict[str, Any]]) -> None:
    load = ServingLoad(requests=1)
    question = instance_report.read_question("aws", load, {"AWS_REGION": "eu-west-1"})
    assert question.training_prices == {"ml.g5.xlarge": 1.408}
    assert question.serving_prices == {"ml.c7i.xlarge": 0.214}
    assert question.price_origin.startswith("AWS's price API, eu-west-1")
    assert {request["ServiceCode"] for request in price_api} == {"AmazonSageMaker"}
    with pytest.raises(ConfigError, match=r"no prices for region 'mars-1'.*--prices FILE"):
        instance_report.read_question("aws", None, {"AWS_REGION": "mars-1"})
    with pytest.raises(ConfigError, match="AWS_REGION is not set"):
        instance_report.read_question("aws", None, {})
