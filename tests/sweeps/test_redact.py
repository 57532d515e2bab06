"""Tests of redaction: secrets are masked, and other text is not changed."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from lightning_scalerl import plan_members
from sweeps.executor.node.attempts import AttemptLog, attempts
from sweeps.launch.ledger import Ledger
from sweeps.redact import MASK, is_secret_name, redact, redact_config, redact_override
from tests.examples import examples
from tests.paths import ROOT

CONF = ROOT / "conf"
few_examples = settings(max_examples=examples(40), derandomize=True)
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"

words = st.text(LETTERS + "_.-+=", min_size=1, max_size=20)
hosts = st.from_regex(r"[a-z]{1,10}(\.[a-z]{2,5}){0,2}(:[0-9]{2,5})?", fullmatch=True)
schemes = st.sampled_from(["http", "https", "postgresql", "mysql+pymysql", "s3", "sqlite", "redis"])
logins = st.text(LETTERS + "!$%&*()=+,;.-_~", min_size=1, max_size=15)
tokens = st.one_of(
    st.from_regex(r"hf_[A-Za-z0-9]{20,40}", fullmatch=True),
    st.from_regex(r"sk-[A-Za-z0-9_-]{20,40}", fullmatch=True),
    st.from_regex(r"gh[pousr]_[A-Za-z0-9]{30,40}", fullmatch=True),
    st.from_regex(r"(AKIA|ASIA)[A-Z0-9]{16}", fullmatch=True),
    st.from_regex(r"github_pat_[A-Za-z0-9]{22}_[A-Za-z0-9]{40,59}", fullmatch=True),
    st.from_regex(r"glpat-[A-Za-z0-9_-]{20,30}", fullmatch=True),
    st.from_regex(r"xox[bap]-[0-9]{10,12}-[A-Za-z0-9]{10,24}", fullmatch=True),
    st.from_regex(r"AIza[A-Za-z0-9_-]{35}", fullmatch=True),
    st.from_regex(r"sk-(ant|proj)-[A-Za-z0-9_-]{20,40}", fullmatch=True),
    st.from_regex(r"eyJ[A-Za-z0-9_-]{10,30}\.eyJ[A-Za-z0-9_-]{10,30}\.[A-Za-z0-9_-]{10,30}", fullmatch=True),
)
around = st.sampled_from(["", " ", "\n", '"', "'", ", ", "(", "=", ": "])
SECRET_NAMES = [
    *("HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "my.secret", "PASSWD"),
    *("PGPASSWORD", "SSHPASS", "MYSQL_PWD", "DB_PASS", "OPENAI_API_KEY", "AZURE_CLIENT_SECRET", "SLURM_JWT"),
    *("MLFLOW_FLASK_SERVER_SECRET_KEY", "GOOGLE_APPLICATION_CREDENTIALS", "accountKey", "SSH_PASSPHRASE"),
]
# Names that do not prove a secret: their values are masked only if they look like keys.
KEYS = ["OPENAI_KEY", "ANTHROPIC_KEY", "WANDB_KEY", "GITHUB_PAT", "AZURE_DEVOPS_EXT_PAT", "DEEPL_AUTH_KEY"]
# Names from this project, torch, Lightning, SLURM and other trainers' configurations that are not secrets.
HARMLESS = [
    *("PATH", "PWD", "OLDPWD", "MONKEY", "KEYBOARD", "COMPASS", "BYPASS", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    *("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SSH_AUTH_SOCK", "XAUTHORITY", "TOKENIZERS_PARALLELISM", "NETRC"),
    *("key", "sort_key", "public_key", "PUBLIC_KEY", "GPG_KEY", "prompt_key", "reward_fn_key", "key_padding", "keys"),
    *("pass_rate", "passes", "pass_rates", "forward_pass", "single_pass", "compass", "bypass", "max_tokens"),
    *("context.max_new_tokens", "pad_token", "eos_token", "file_pat", "work_pwd", "secretary", "tokenizer"),
]


# --- text without secrets is not changed ---------------------------------------------------------------------


def recipes() -> list[str]:
    return ["scalerl", "scalerl+loss=dapo", "scalerl_core+aggregation=token,advantage=grpo", "grpo+length_control=none"]


ORDINARY = [
    *recipes(),
    "/home/me/outputs/my study/runs/0123456789ab/checkpoints/step=000150.ckpt",
    "C:\\Users\\me",
    "https://mlflow.example:5000/#/experiments/3?a=b@c",
    "http://127.0.0.1:5000",
    "sqlite:////work/mlruns.db",
    "s3://bucket/key:with/colon",
    "file:///tmp/a:b",
    "me@example.com wrote: at 12:30 see http://host:80/x",
    "git@github.com:owner/repository.git",
    "ssh://git@github.com/owner/repository.git",
    "n[1-3],node-7:4",
    "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 78 GiB total)",
    "ValueError: max_new_tokens=5 must be more than 6; token 128009 is no end of text",
    "task-specific risk-aware ask-me-anything-about-everything-here",
    "hf_hub_download, sk-learn, ghp_short, AKIA, github_pat_, glpat-, xoxb-, AIza, eyJ.eyJ.",
    "export HF_TOKEN=$(cat ~/.token) PGPASSWORD=$DB_PASSWORD; set HF_TOKEN=<yours>, WANDB_API_KEY=",
    "--max-new-tokens 128 --num-tokens=5 --pad-token '<pad>' --tokenizer here --keys all --password",
    "KeyError: 'token'; {'pass_rate': '0.5', 'sort_key': 'step', 'max_tokens': '18'}, token=prompt, stop_token=12",
    "Authorization: disabled; the bearer of bad news; a basic authorization, public_key=ssh-ed25519",
    "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
    "token: secret: password:",
    "",
    "ünïcödé ☃ \x00 \n\t",
]


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text_is_not_changed(text: str) -> None:
    assert redact(text, {}) == text
    environment = {"HOME": "/home/me", "USER": "me", "PATH": "/usr/bin", "SLURM_JOB_ID": "123456", "TOKENIZERS": text}
    assert redact(text, environment) == text


@few_examples
@given(st.lists(words, max_size=6), st.sampled_from([" ", "/", ":", ", ", "\n", "="]))
def test_words_and_paths_are_not_changed(parts: list[str], between: str) -> None:
    text = between.join(parts)
    assume(not re.search(r"hf_|sk-|gh[pousr]_|AKIA|=", text))
    assert redact(text, {}) == text


@few_examples
@given(schemes, hosts, st.lists(words, max_size=3))
def test_an_address_without_a_login_is_not_changed(scheme: str, host: str, path: list[str]) -> None:
    text = f"{scheme}://{'/'.join([host, *path])}"
    assume(not re.search(r"hf_|sk-|gh[pousr]_|AKIA|=", text))
    assert redact(text, {}) == text


@few_examples
@given(st.text(), st.sampled_from(["HOME", "EDITOR", "MONKEY", "TOKENIZERS_PARALLELISM", "SECRETARY", "KEYBOARD"]))
def test_values_of_ordinary_variables_are_not_masked(value: str, name: str) -> None:
    assert redact(f"a {value} b", {name: value}) == redact(f"a {value} b", {})


@pytest.mark.parametrize("name", HARMLESS)
def test_names_that_only_resemble_secrets_are_not_masked(name: str) -> None:
    assert not is_secret_name(name)
    assert redact("a value-of-1-kind b", {name: "value-of-1-kind"}) == "a value-of-1-kind b"
    assert redact_config({name: "value"}) == {name: "value"}
    assert redact(f"{name}=value-of-1 --{name} value-of-1", {}) == f"{name}=value-of-1 --{name} value-of-1"


@pytest.mark.parametrize("value", ["completion", "step", "/usr", "~", "a_column"])
def test_a_key_whose_value_is_a_word_or_folder_is_not_masked(value: str) -> None:
    assert redact(f"by {value}", {"GROUPING_KEY": value}) == f"by {value}"


@pytest.mark.parametrize("value", ["~no-such-user-7f3a", "/" + "k" * 300, "/no\0path"])
def test_a_secret_that_only_looks_like_a_path_is_masked(value: str) -> None:
    assert redact(f"by {value}", {"DB_PASSWORD": value}) == "by ***"


def test_a_secret_that_is_an_unreadable_path_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The value looks like a path, but cannot be read. The PermissionError must not reach the caller."""

    def stat(path: Path, **options: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", stat)
    assert redact("by /etc/ssl/private/my.pem", {"TLS_SECRET": "/etc/ssl/private/my.pem"}) == "by ***"


@pytest.mark.parametrize("value", ["", "a", "yes", "token", "12345"])
def test_short_and_common_values_are_not_masked(value: str) -> None:
    assert redact(f"aggregation: {value}", {"MY_TOKEN": value}) == f"aggregation: {value}"


# --- secrets -------------------------------------------------------------------------------------------------


@few_examples
@given(st.text(max_size=30), schemes, logins, logins, hosts, around)
def test_a_login_in_an_address_is_masked_and_the_address_kept(
    before: str, scheme: str, user: str, password: str, host: str, edge: str
) -> None:
    text = f"{before}{edge}{scheme}://{user}:{password}@{host}/path"
    masked_text = redact(text, {})
    assert f"{scheme}://{MASK}@{host}/path" in masked_text
    assert f"{user}:{password}@" not in masked_text


@few_examples
@given(
    st.lists(st.tuples(schemes, logins, logins, hosts), min_size=2, max_size=4),
    st.sampled_from([" ", ", ", "\n", "' '"]),
)
def test_every_address_in_a_text_is_masked(addresses: list[tuple[str, str, str, str]], between: str) -> None:
    text = between.join(f"{scheme}://{user}:{password}@{host}" for scheme, user, password, host in addresses)
    assert redact(text, {}) == between.join(f"{scheme}://{MASK}@{host}" for scheme, _, _, host in addresses)


@few_examples
@given(tokens, around, around)
def test_a_well_known_token_is_masked_anywhere(token: str, before: str, after: str) -> None:
    masked_token = redact(f"see{before or ' '}{token}{after or ' '}there", {})
    assert token.rstrip("-") not in masked_token
    assert MASK in masked_token


@few_examples
@given(
    st.text(st.characters(exclude_characters="*"), min_size=6, max_size=40),
    st.sampled_from(SECRET_NAMES),
    st.text(max_size=20),
)
def test_the_value_of_a_secret_variable_is_masked_anywhere(value: str, name: str, text: str) -> None:
    masked_value = redact(f"{text}{value}{text}{value}", {name: value})
    assert value not in masked_value


@few_examples
@given(
    st.from_regex(r"[A-Za-z0-9+_-][A-Za-z0-9/+_-]{4,30}[0-9]", fullmatch=True),
    st.sampled_from(KEYS),
    st.text(max_size=9),
)
def test_values_that_look_like_keys_are_masked(value: str, name: str, text: str) -> None:
    assert value not in redact(f"{text} {value} {text}", {name: value})


assigned = st.sampled_from([name for name in SECRET_NAMES + KEYS if name.isupper()])


@few_examples
@given(
    st.sampled_from(["", "export ", "env A=b ", "('", "setup=[export "]),
    assigned,
    st.text(LETTERS + "!%+,-./:@_~", min_size=1, max_size=20).filter(lambda text: any(map(str.isalnum, text))),
    st.sampled_from(["", "'", '"']),
)
def test_values_assigned_to_secret_names_are_masked(before: str, name: str, value: str, quote: str) -> None:
    assume(re.search(r"[a-zA-Z]", value) and not re.match(r"(?i)(none|null|true|false)\b", value))
    masked_command = redact(f"{before}{name}={quote}{value}{quote} command", {})
    assert masked_command == f"{before}{name}={MASK} command"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("PGPASSWORD='a b, c' psql -h db", "PGPASSWORD=*** psql -h db"),
        ("train --hf-token abc --seed 1", "train --hf-token *** --seed 1"),
        ("train --password=12345", "train --password=***"),
        ("sshpass -p 'open sesame' ssh n1", "sshpass -p *** ssh n1"),
        ("{'db': {'password': 'open sesame', 'user': 'me'}}", "{'db': {'password': '***', 'user': 'me'}}"),
        ('{"api_key": "abc", "seed": 1}', '{"api_key": "***", "seed": 1}'),
        ("GET https://h/x?access_token=abc&page=2", "GET https://h/x?access_token=***&page=2"),
        ("curl -H 'Authorization: Bearer abc-def.ghi' h", "curl -H 'Authorization: Bearer ***' h"),
        ("Authorization: Basic bWU6c2VjcmV0", "Authorization: Basic ***"),
        ("curl -H 'PRIVATE-TOKEN: abcdefghijk' h", "curl -H 'PRIVATE-TOKEN: ***' h"),
        ("https://hooks.slack.com/services/T0/B0/abcdef", "https://hooks.slack.com/services/***"),
    ],
)
def test_secrets_in_commands_and_messages_are_masked(text: str, expected: str) -> None:
    assert redact(text, {}) == expected
    assert redact(expected, {}) == expected


@pytest.mark.parametrize("kind", ["", "RSA ", "OPENSSH ", "EC ", "ENCRYPTED "])
@pytest.mark.parametrize("between", ["\n", "\\n"])
@pytest.mark.parametrize("cut", [False, True])
def test_a_private_key_is_masked_whole_or_cut_off(kind: str, between: str, cut: bool) -> None:
    body = between.join(["MIIEvQIBADANBgkqhkiG9w0B", "AQEFAASCBKcwggSjAgEAAoIBAQ+/=="])
    text = f"-----BEGIN {kind}PRIVATE KEY-----{between}{body}"
    whole = text if cut else f"{text}{between}-----END {kind}PRIVATE KEY-----"
    assert redact(f"see: {whole}", {}) == f"see: {MASK}"


@few_examples
@given(st.text(st.characters(exclude_characters="*")), tokens, logins, st.text("abc", min_size=6, max_size=9))
def test_masking_twice_changes_nothing(text: str, token: str, login: str, value: str) -> None:
    environment = {"MY_SECRET": value}
    once = redact(f"{text} {token} http://{login}:{login}@host {value} PGPASSWORD={login}", environment)
    assert redact(once, environment) == once


def test_an_override_is_masked_by_its_key() -> None:
    assert redact_override("+wandb.token=abc") == f"+wandb.token={MASK}"
    assert redact_override("seed=0,1") == "seed=0,1"
    assert redact_override("aggregation=token") == "aggregation=token"
    assert (
        redact_override("hydra.launcher.setup=[export A_TOKEN=abc]") == f"hydra.launcher.setup=[export A_TOKEN={MASK}"
    )


@pytest.mark.parametrize("names", [("A_TOKEN", "B_TOKEN"), ("B_TOKEN", "A_TOKEN")])
def test_two_secrets_with_a_common_part_are_both_masked(names: tuple[str, str]) -> None:
    short, long = "hunter2", "hunter2-of-production"
    environment = dict(sorted({names[0]: short, names[1]: long}.items()))
    reverse = dict(reversed(environment.items()))
    assert redact(f"{short} {long}", environment) == redact(f"{short} {long}", reverse) == f"{MASK} {MASK}"


@pytest.mark.parametrize(
    "text",
    ["https://me:hunter2@hunter3@host/path", "https://hunter2hunter3hunter2hunter3@host/path"],
    ids=["@", "alone"],
)
def test_unusual_logins_are_masked_too(text: str) -> None:
    assert redact(text, {}) == f"https://{MASK}@host/path"


def test_the_default_environment_is_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_API_KEY", "something-of-ours")
    assert redact("with something-of-ours") == f"with {MASK}"
    assert redact("with something-of-ours", {}) == "with something-of-ours"


# --- configurations ------------------------------------------------------------------------------------------

values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), words),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)),
    max_leaves=8,
)
plain_keys = ["aggregation", "token_level", "prefill_token_s", "keys", "monkey", "path", "secretary"]


@few_examples
@given(
    st.dictionaries(st.sampled_from(plain_keys), st.one_of(st.integers(), st.sampled_from(["token", "none", "prompt"])))
)
@example({"aggregation": "token"})
@example({"max_new_tokens": 5, "max_prompt_tokens": 7})
@example({"context.max_new_tokens": "18,24,30"})
def test_a_configuration_without_secrets_is_not_changed(config: dict[str, Any]) -> None:
    assert redact_config(config) == config
    assert redact_config({"a": {"b": [config, config]}}) == {"a": {"b": [config, config]}}


def test_our_configuration_files_contain_no_secrets() -> None:
    for path in sorted(CONF.rglob("*.yaml")):
        config = yaml.safe_load(path.read_text())
        assert redact_config(config) == config, path
        assert redact(path.read_text(), {}) == path.read_text(), path


@pytest.mark.full
def test_specs_and_headers_of_members_are_not_changed(tmp_path: Path) -> None:
    """Masking part of a spec or of a journal's header would make a study refuse its runs or misreport them."""
    experiments = ("variant=none", "experiment=replication", "aggregation=token context.max_new_tokens=18")
    for spec in plan_members([["study=x", "model.batches=1", *words.split()] for words in experiments], []):
        spec.write(tmp_path / spec.run)
        frozen = (tmp_path / spec.run / "spec.json").read_text()
        assert redact(frozen, {}) == frozen
        assert redact_config(json.loads(frozen)) == json.loads(frozen)
        assert redact_config(spec.header()) == spec.header()


@few_examples
@given(values)
def test_a_configuration_keeps_its_shape_and_its_numbers(config: Any) -> None:
    def shape(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shape(item) for key, item in value.items()}
        if isinstance(value, list):
            return [shape(item) for item in value]
        return type(value) if isinstance(value, str) else value

    once = redact_config(config)
    assert shape(once) == shape(config)
    assert redact_config(once) == once


@few_examples
@given(
    st.sampled_from(
        ["token", "hf_token", "api_key", "apikey", "password", "db.password", "AWS_SECRET", "credentials", "tokens"]
    ),
    st.text(min_size=1),
)
def test_values_under_secret_names_are_masked_at_any_depth(name: str, value: str) -> None:
    assert redact_config({name: value}) == {name: MASK}
    assert redact_config({"a": [{name: value}]}) == {"a": [{name: MASK}]}
    assert redact_config({name: [value, value]}) == {name: [MASK, MASK]}
    assert redact_config({name: None}) == {name: None}
    assert redact_config({name: 5}) == {name: 5}


# --- where it is used ----------------------------------------------------------------------------------------


def test_reasons_are_masked_in_ledger_and_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_API_KEY", "something-of-ours")
    reason = "cannot reach https://me:hunter2@host with something-of-ours"
    ledger = Ledger(tmp_path)
    ledger.append("planned", "a")
    ledger.append("failed", "a", kind="error", reason=reason)
    log = AttemptLog(tmp_path, "abc", "1", 0, "n")
    log.begin(0)
    log.end("failed", "error", reason)
    expected = f"cannot reach https://{MASK}@host with {MASK}"
    assert ledger.fold()["a"].reason == expected
    assert attempts(tmp_path)[0].reason == expected
