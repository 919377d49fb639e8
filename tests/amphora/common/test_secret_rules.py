"""Which names, shapes and known values are masked, and which look-alikes are not."""

import re

import pytest

from amphora.common import logs, secret_rules
from tests.support.paths import ROOT

# Written in parts, so that scanners of repositories find no secret here.
SHAPES = [
    "AKIA" + "IOSFODNN7EXAMPLE", "ASIA" + "IOSFODNN7EXAMPLE", "IQoJ" + "a" * 80,
    "hf_" + "abcdefghijklmnopqrstuv", "api_org_" + "abcdefghijklmnopqrstuv",
    "ghp_" + "0123456789abcdefghijABCDEFGHIJ012345", "gho_" + "0123456789abcdefghijABCDEFGHIJ012345",
    "github_pat_" + "11ABCDEFG0123456789_abcdefghijklmnop",
    "glpat-" + "abcdEFGH1234_-xyz567", "gldt-" + "abcdEFGH1234_-xyz567", "glrt-" + "abcdEFGH1234_-xyz567",
    "xoxb-" + "123456789012-1234567890123-abcdefghijkl", "xoxp-" + "123456789012-abcdef",
    "xapp-" + "1-A0123456789-abcdef",
    "https://hooks.slack.com/services/" + "T00000000/B00000000/abcdefghijkl",
    "AIza" + "SyA-1234567890abcdefghijklmnopqrstu", "ya29." + "a0AfH6SMBabcdefghijklmnop",
    "GOCSPX-" + "abcdefghijklmnopqrstuvwx",
    "sk-" + "abcdefghijklmnopqrstuvwx", "sk-proj-" + "abcdefghijklmnop", "sk-ant-api03-" + "abcdefghijkl",
    "sk_live_" + "abcdefghijklmnop", "rk_test_" + "abcdefghijklmnop", "gsk_" + "a1" * 25, "r8_" + "a1" * 18,
    "dapi" + "0123456789abcdef" * 2, "SG." + "a1b2c3d4e5f6g7h8i9j0kl" + "." + "m" * 43,
    "npm_" + "a1b2c3" * 6, "pypi-AgE" + "IcHlwaS5vcmcabcdefghij", "dckr_pat_" + "abcdefghijklmnopqrstu",
    "eyJ" + "hbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N",
    "wandb: key " + "0123456789abcdef0123456789abcdef01234567", "wandb_v1_" + "abcdefghijklmnopqrstuvwx",
    "Bearer abc.def-123456", "Authorization: Basic dXNlcjpwYXNzd29yZDE=",
    "https://user:s3cr3tpass@host/x", "https://bob:p@s3cr3t@host/x", "redis://:s3cr3tpass@cache:6379", "postgresql://u:p%40ss@db/x",
    "https://ghtoken1234@github.com/a/b", "http://token@host", "git+https://abcdef@host/x.git",
    "https://a.blob.core.windows.net/c/b?sv=2022&sig=abcDEF123%2Fghi%3D&se=2030",
    "&X-Amz-Signature=deadbeef", "?X-Amz-Security-Token=deadbeef",
    "DefaultEndpointsProtocol=https;AccountKey=abcd1234+/==;", "SharedAccessKey=abcd1234=",
    "password=hunter2!", '{"api_key": "abcd1234"}', "{'SecretAccessKey': 'wJalrXUtnFEMI'}",
    "dbPassword=hunter22", "HF_TOKEN_1: abcd1234", "'hfToken': 'abcd1234'", "GH_TOKENS=abcd1234,efgh",
    "license_key = ABCD-1234", "--hub_token abcd1234", "--apiToken=abcd1234", "--token abcd1234",
    "CLIENT_SECRET_2=abcd1234", "private_key_pem: MIIEvQIBADANBg",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEvQIBADANBg\n-----END RSA PRIVATE KEY-----",
    "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\n",
]  # fmt: skip


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_known", [])


def test_names_of_secrets_and_of_ordinary_things() -> None:
    names = [
        "HF_TOKEN", "hf_token", "hfToken", "HFToken", "HF_TOKEN_1", "HF_TOKEN_PROD", "hub_token",
        "use_auth_token", "token", "TOKEN_ID", "apiToken", "api_token", "accessToken", "session_token",
        "AWS_SESSION_TOKEN", "sas_token", "bot_token", "GH_TOKENS", "github_tokens", "apiTokens",
        "GITHUB_PAT", "github.pat", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID",
        "aws-secret-access-key", "secretAccessKey", "api-key", "api_keys", "apikey", "OPENAI_API_KEY",
        "OPENAI_KEY", "openaiKey", "WANDB_API_KEY", "private_key", "private_key_pem",
        "PRIVATE_KEY_B64", "license_key", "licenseKey", "ssh_key", "signing_key", "encryptionKey",
        "storage_account_key", "account_key", "subscription_key", "hmac_key", "client.secret",
        "clientSecret", "CLIENT_SECRET_2", "secrets", "db_password", "dbPassword", "DB_PASSWORD_NEW",
        "DB_PWD", "DB_PASS", "smtp_pass", "passphrase", "sshPassphrase", "admin.passwd",
        "root_password2", "credentials", "gcp_credentials_json", "proxy-authorization",
        "AZURE_STORAGE_CONNECTION_STRING", "connectionString", "jwt", "auth_jwt", "apitoken",
        "accesskey", "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
    ]  # fmt: skip
    assert [name for name in names if not secret_rules.is_secret_name(name)] == []
    ordinary_names = [
        "max_new_tokens", "max_tokens", "min_new_tokens", "num_tokens", "batch_tokens",
        "AMPHORA_BATCH_TOKENS", "stop_tokens", "special_tokens", "additional_special_tokens", "tokens",
        "tokens_per_second", "flops_per_token", "tokenizer", "tokenizer_name",
        "TOKENIZERS_PARALLELISM", "tokenization", "token_type_ids", "pad_token", "pad_token_id",
        "eos_token", "eosToken", "eos_token_ids", "bos_token", "sep_token", "cls_token", "mask_token",
        "unk_token", "image_token", "next_token", "decoder_start_token_id", "stop_token",
        "new_token_count", "keep_first_token", "token_classification", "key",
        "key_column", "keyboard", "primary_key", "sort_key", "public_key", "label_key", "text_key",
        "keys", "keypoints", "monkey", "password_column", "secret_name", "secret_arn", "secretary",
        "secrets_manager_region", "PWD", "OLDPWD", "pwd_mode", "passage", "forward_pass", "num_passes",
        "compass", "bypass", "author", "authors", "authority", "auth_mode", "credentials_file",
        "private", "private_key_path", "path", "patience", "patch_size", "compatible", "connection",
        "connection_timeout", "string_column", "headers", "signature", "license", "jwt_issuer",
        "session_seconds", "access_mode", "api_version", "num_train_epochs", "learning_rate",
        "label_column",
    ]  # fmt: skip
    assert [name for name in ordinary_names if secret_rules.is_secret_name(name)] == []


@pytest.mark.parametrize("text", SHAPES)
def test_shapes_are_masked(text: str) -> None:
    masked = logs.mask(f"before {text} after\n")
    assert logs.MASK in masked
    assert masked.startswith("before ")
    values = r"abcd1234|hunter2|s3cr3t|p%40ss|MIIEvQ|b3BlbnN|deadbeef|ghtoken"
    assert not re.search(values, masked)


@pytest.mark.parametrize("text", [
    "An input is '/etc/passwd': URLs and paths are not followed.",
    "commit 0123456789abcdef0123456789abcdef01234567", "sha256:" + "0123456789abcdef" * 4,
    "loss=0.5 tokens=1234", "max_new_tokens=512", "max_tokens: 4096", "--max_new_tokens 2048",
    "AMPHORA_BATCH_TOKENS=16384", "tokens_per_second: 12345", "flops_per_token=6000000",
    "pad_token: [PAD]", "eos_token='</s>'", "eos_token_id=50256", "pad_token='<|endoftext|>'",
    "mask_token=<mask>", "decoder_start_token_id: 50258", "tokenizer_name=bert-base-uncased",
    "unexpected token: function", "token 1234 of 5678", "next token: hello", "token: hello",
    "key error: 'x'", "KeyError: 'input_ids'", "key_column=customer_id", "primary_key: row_number",
    "missing keys: classifier.weight", "unexpected keys: pooler.dense.weight", "--key_column customer",
    "secret_name: hub-credentials", "secrets_manager_region=eu-west-1", "password_column=words",
    "forward_pass: 0.123", "passage: once upon a time", "bypass=true1", "hub_token=None",
    "use_auth_token: False", "password: null", "using basic tokenization", "basic block number",
    "a bearer of news", "user@host", "write to anna@example.com", "https://host:8080/x",
    "http://127.0.0.1:8080/invocations", "https://medium.com/@user/a-story", "ssh://git@github.com/a/b",
    "https://git@github.com/a/b", "s3://bucket/path/to/model.tar.gz", "git@github.com:a/b.git",
    "signature=inspect.signature", "https://host/x?size=12345678", "https://host/?signal=12345678",
    "hf_model", "hf_hub_download", "sk-learn", "task-classification", "risk-of-loss", "gl-matrix",
    "eyJust a word", "a.b.c", "AKIA", "npm_config_cache", "local-rank", "glpat", "xoxo", "Asia/Tokyo",
    "patience=3333", "compatible: 12345", "ssh_port=2222", "connection_timeout=5000", "monkey=banana",
    "public_key: ssh-ed25519", "access_mode=readonly", "author=somebody", "2024-01-01 key value pairs",
])  # fmt: skip
def test_ordinary_text_stays(text: str) -> None:
    assert logs.mask(text) == text
    assert not secret_rules.is_secret_value(text)


def test_values_of_secrets() -> None:
    named = r"(?i)abcd-?1234|hunter2|wJalr|pem:"
    # The others follow a name, which may be prose.
    shapes = [text for text in SHAPES if not re.search(named, text)]
    assert [text for text in shapes if not secret_rules.is_secret_value(text)] == []


def test_both_packages_hold_the_same() -> None:
    copy = (ROOT / "container/amphora/common/secret_rules.py").read_bytes()
    assert copy == (ROOT / "code/recipe/secret_rules.py").read_bytes()


@pytest.mark.parametrize(
    "text", ["token " + "a-" * 30_000, "eyJ-" * 20_000, "key=" * 20_000, "https://" * 10_000,
             "x_token:" * 10_000, "wandb " * 10_000, "secret " + "--a" * 30_000, "token" + " " * 60_000],
    ids=range(8),
)  # fmt: skip
@pytest.mark.timeout(60)
def test_a_long_line_is_masked_at_once(text: str) -> None:
    logs.mask(text)


def test_a_known_value_is_masked_in_every_spelling_unless_it_is_short() -> None:
    logs.remember(['p"ss/wörd\n-second-line-'])
    for text in ('p"ss/wörd', r"p\"ss/w\u00f6rd", "p%22ss%2Fw%C3%B6rd", "-second-line-"):
        assert logs.mask(f"x {text} y") == f"x {logs.MASK} y", text
    logs.remember(["1234"])
    assert logs.mask("step 1234") == "step 1234"
    # What may become a secret is held back.
    logs.remember(["s3cr3tvalue"])
    assert logs.count_unfinished("a line with s3cr3t") == len("s3cr3t")
    assert logs.count_unfinished("a line without") == 0
    # Bytes that are no text.
    logs.remember(["\udcff" * 8])


@pytest.mark.parametrize("text", ["token s3cr3tvalue", "-----BEGIN PRIVATE KEY-----"])
def test_a_mask_does_not_join_a_log_line_to_the_next(text: str) -> None:
    logs.remember(["s3cr3tvalue\n"])  # A variable that was set from a file.
    masked = logs.mask(f"{text}\n")
    assert masked.endswith(f"{logs.MASK}\n") and masked == logs.mask(text) + "\n"
