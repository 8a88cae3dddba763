# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Lint of configurations: the rules, what an image is asked and answers, the catalogue, the table of features."""

from __future__ import annotations

import argparse
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.testing import patch_module_args
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.module_utils.engines import (
    features,
    image_lint,
    in_image,
    lint,
    registry,
)
from ansible_collections.metal.serve.plugins.module_utils.engines.catalogue import OPTIONS
from ansible_collections.metal.serve.plugins.module_utils.engines.image_lint import Known
from ansible_collections.metal.serve.plugins.modules import engine_config_lint

from .plans import DIGEST, context, pool_plan, replica_plan

ROOT = Path(__file__).parents[3]
KNOWN = {
    "max_num_seqs": Known("int"),
    "max_num_batched_tokens": Known("int"),
    "gpu_memory_utilization": Known("float"),
    "enforce_eager": Known("bool"),
    "headless": Known("bool", (), negatable=False),
    "scheduling_policy": Known("str", ("fcfs", "priority")),
    "served_model_name": Known("list"),
    "compilation_config": Known("json"),
    "whatever": Known("any"),
}


@pytest.mark.parametrize(
    ("name", "value", "step", "words"),
    [
        ("max_num_batched", 1024, "name", "write max_num_batched_tokens"),
        ("max_num_sequences", 8, "name", "nearest: max_num_seqs"),
        ("max_num_seqs", "16", "type", "without quotes"),
        ("max_num_seqs", 1.5, "type", "a whole number"),
        ("max_num_seqs", True, "type", "a whole number"),
        ("max_num_seqs", None, "type", "give it one or remove it"),
        ("gpu_memory_utilization", "high", "type", "a number"),
        ("enforce_eager", "true", "type", "without quotes"),
        ("headless", False, "type", "remove it"),
        ("scheduling_policy", "lifo", "type", "fcfs, priority"),
        ("scheduling_policy", ["fcfs"], "type", "one word"),
        ("compilation_config", 3, "type", "a mapping"),
    ],
)
def test_wrong_options_are_named_with_what_is_right(name: str, value: Any, step: str, words: str) -> None:
    (found,) = image_lint.judge({name: value}, KNOWN)
    assert (found.option, found.step) == (name, step)
    assert words in found.right


def test_right_options_are_let_through() -> None:
    config = {
        "max-num-seqs": 8,
        "gpu-memory-utilization": 1,
        "enforce-eager": False,
        "headless": True,
        "scheduling-policy": "priority",
        "served-model-name": ["a", "b"],
        "compilation-config": {"mode": 3},
        "whatever": False,
    }
    assert image_lint.judge(config, KNOWN) == []
    # model.json is taken literally: a dash there is no underscore.
    assert image_lint.judge({"max-num-seqs": 8}, KNOWN, dashes=False) != []


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.text(max_size=20), st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.text()), max_size=4
    )
)
def test_any_configuration_is_judged(config: dict[str, Any]) -> None:
    for problem in image_lint.judge(config, KNOWN):
        assert problem.option in config
        assert problem.right


def _json_only(text: str) -> Any:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("no object")
    return value


def test_a_parser_s_options_are_described_by_what_they_take() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--whole", type=int)
    parser.add_argument("--real", type=float)
    parser.add_argument("--word")
    parser.add_argument("--one-of", choices=["a", "b"])
    parser.add_argument("--many", nargs="+")
    parser.add_argument("--flag", action="store_true")
    parser.add_argument("--both", action=argparse.BooleanOptionalAction)
    parser.add_argument("--object", type=_json_only)
    parser.add_argument("--optional", type=lambda text: None if text == "None" else int(text))
    assert image_lint.options_of(parser) == {
        "whole": Known("int"),
        "real": Known("float"),
        "word": Known("str"),
        "one_of": Known("str", ("a", "b")),
        "many": Known("list"),
        "flag": Known("bool", (), negatable=False),
        "both": Known("bool", (), negatable=True),
        "object": Known("json"),
        "optional": Known("int"),
    }


# --- A stand-in for an engine's package, so that the script runs whole, as in an image ---

ENGINE = """
import argparse, json
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--max-running-requests", type=int)
        parser.add_argument("--port", type=int)
    @classmethod
    def from_cli_args(cls, given):
        made = cls(); made.given = given; return made
    def resolve_once(self):
        print("engines print whatever they like")
        if self.given.max_running_requests == 0:
            raise ValueError("max_running_requests must be positive")
"""
MERGER = """
class ConfigArgumentMerger:
    def __init__(self, parser): pass
    def merge_config_with_args(self, argv):
        import json
        return [word for name, value in json.load(open(argv[1])).items() for word in ("--" + name, str(value))]
"""


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A folder on PYTHONPATH that looks like an image with SGLang."""
    package = tmp_path / "site" / "sglang" / "srt" / "utils"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").write_text("")
    (package.parent.parent / "version.py").write_text('__version__ = "0.5.23"\n')
    (package.parent / "server_args.py").write_text(ENGINE)
    (package / "server_args_config_parser.py").write_text(MERGER)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path


def run_script(image: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    script = image / "image_lint.py"
    script.write_bytes(Path(image_lint.__file__).read_bytes())
    done = subprocess.run(
        [sys.executable, "-S", str(script), *arguments],
        env={**os.environ, "PYTHONPATH": str(image / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, json.loads(done.stdout)


def test_the_script_asks_the_engine_in_the_image(image: Path) -> None:
    files = {"good.json": {"port": 1}, "none.json": {"max-running-requests": 0}, "short.json": {"max-running": 4}}
    for name, content in files.items():
        (image / name).write_text(json.dumps(content))
    (image / "broken.json").write_text("{")
    code, report = run_script(
        image, "sglang", str(image / "model"), *(str(image / name) for name in [*files, "broken.json"])
    )
    good, none, short, broken = report["files"]
    assert (code, report["version"]) == (1, "0.5.23")
    assert good["problems"] == []
    assert good["checked"] == ["names", "types", "parser", "semantic"]
    assert [one["step"] for one in none["problems"]] == ["semantic"]
    assert "must be positive" in none["problems"][0]["problem"]
    assert short["problems"][0]["right"] == "write max_running_requests"
    assert broken["problems"][0]["step"] == "file"


def test_the_script_says_what_it_could_not_judge(image: Path) -> None:
    (image / "good.json").write_text('{"port": 1}')
    code, report = run_script(image, "sglang", str(image / "no-model"), str(image / "good.json"))
    assert code == 0
    assert "no config.json" in report["files"][0]["skipped"][0]
    code, report = run_script(image, "vllm", str(image / "model"), str(image / "good.json"))
    assert code == 2
    assert "holds no vllm" in report["error"]


def test_the_script_describes_options(image: Path) -> None:
    _code, report = run_script(image, "sglang", "--describe")
    assert report["options"]["max_running_requests"]["kind"] == "int"


# --- What is run, and what the answer means ---


def replica(number: int = 0, kind: str = "sglang", text: str = "", **changes: Any) -> dict[str, Any]:
    """Return what metal.serve.engine_replicas gives for one replica."""
    version = "0.5.23" if kind == "sglang" else "0.26.0"
    plan = replica_plan(replica=f"short-{number}", engine=kind, engine_version=version, port=8100 + number, **changes)
    spec = registry.adapter(kind).spec(context(plan, pool_plan())).to_dict()
    name = spec["files"][-1 if kind == "triton_vllm" else 0]["name"]
    return {"spec": spec, "files": {name: text or f"host: 10.0.0.11\nport: {8100 + number}\nmax-running-requests: 4\n"}}


def test_replicas_that_differ_in_address_alone_are_judged_once() -> None:
    (job,) = in_image.jobs([replica(0), replica(1)])
    assert job.replicas == ("short-0", "short-1")
    assert len(in_image.jobs([replica(0), replica(1, text="max-running-requests: 5\n")])) == 2
    assert in_image.jobs([replica(0, kind="triton_vllm", text="{}")])[0].file == "model.json"


def test_the_image_gets_no_network_no_gpu_and_nothing_to_write() -> None:
    (job,) = in_image.jobs([replica(0)])
    line = in_image.command(job, "/f", "name", "6g")
    text = " ".join(line)
    for part in (
        "--network none",
        "--cap-drop ALL",
        "--read-only",
        "--pull never",
        "/f:/metalserve-lint:ro",
        ":/model:ro",
    ):
        assert part in text
    assert "--gpus" not in text
    assert "NVIDIA_VISIBLE_DEVICES" not in text
    assert line[-4:] == ["/metalserve-lint/image_lint.py", "sglang", "/model", "/metalserve-lint/config.yaml"]


def test_another_version_in_the_image_is_said() -> None:
    (job,) = in_image.jobs([replica(0)])
    file = {"file": "c", "problems": [], "checked": ["names"], "skipped": []}
    found = in_image.result(job, 0, json.dumps({"kind": "sglang", "version": "0.5.24", "files": [file]}), "")
    assert found["status"] == "wrong"
    assert in_image.lines(found) == [
        'short-0: engine_version says 0.5.23, the image holds 0.5.24 (write engine_version "0.5.24" in the pool, or give it '
        "another image)"
    ]
    file = {"file": "c", "problems": [], "checked": ["names"], "skipped": []}
    same = json.dumps({"kind": "sglang", "version": "0.5.23+cpu", "files": [file]})
    assert in_image.result(job, 0, same, "")["status"] == "ok"
    assert in_image.result(job, 1, "no JSON", "Traceback")["status"] == "unknown"
    for odd in (
        "1",
        "null",
        "[]",
        "{}",
        '{"version": "1.0", "files": []}',
        '{"files": [{}], "version": "1"}',
        "[" * 5000,
    ):
        assert in_image.result(job, 0, odd, "")["status"] == "unknown"


class ExitedError(Exception):
    """The module's answer."""


def run_module(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> dict[str, Any]:
    def leave(self: Any, **values: Any) -> None:
        raise ExitedError(values)

    monkeypatch.setattr(AnsibleModule, "exit_json", leave)
    monkeypatch.setattr(AnsibleModule, "fail_json", lambda self, **values: leave(self, failed=True, **values))
    with patch_module_args(arguments), pytest.raises(ExitedError) as caught:
        engine_config_lint.main()
    values: dict[str, Any] = caught.value.args[0]
    return values


@pytest.fixture
def docker(image: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A docker whose image is the folder ``image``."""
    program = image / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(
        f"""#!{sys.executable}
import os, subprocess, sys
words = sys.argv
if os.path.exists({str(image / "missing")!r}):
    sys.stderr.write("docker: Error: No such image: x.\\n"); sys.exit(125)
mounts = dict(word.split(":")[:2][::-1] for word, before in zip(words[1:], words) if before == "--volume")
script, kind, _model, config = words[-4:]
real = lambda path: path.replace("/metalserve-lint", mounts["/metalserve-lint"])
with open({str(image / "calls")!r}, "a") as log: log.write("x")
sys.exit(subprocess.call([sys.executable, "-S", real(script), kind, {str(image / "model")!r}, real(config)],
                         env={{**os.environ, "PYTHONPATH": {str(image / "site")!r}}}))
"""
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return image


JSON = '{"port": 8100, "max-running-requests": 4}'


def test_the_module_judges_once_and_remembers(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The stand-in reads JSON, which is YAML too.
    monkeypatch.setattr(image_lint, "__doc__", image_lint.__doc__)
    site = docker / "site" / "yaml.py"
    site.write_text("import json\nsafe_load = json.load\n")
    root = str(docker / "root")
    first = run_module(monkeypatch, replicas=[replica(0, text=JSON)], root=root)
    again = run_module(monkeypatch, replicas=[replica(0, text=JSON)], root=root)
    assert (first["results"][0]["status"], again["results"][0]["status"]) == ("ok", "known")
    assert first["changed"] is False
    assert (docker / "calls").read_text() == "x"


def test_the_module_fails_with_every_problem(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (docker / "site" / "yaml.py").write_text("import json\nsafe_load = json.load\n")
    root = str(docker / "root")
    bad = replica(0, text='{"max-running": 4, "port": "8100"}')
    found = run_module(monkeypatch, replicas=[bad], root=root)
    assert found["failed"]
    assert found["msg"].splitlines() == [
        "short-0: max-running is an abbreviation, which the engine would guess at (write max_running_requests)",
        "short-0: port is the text '8100' (write the number without quotes)",
    ]


def test_an_image_that_is_not_there_yet(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (docker / "missing").touch()
    root = str(docker / "root")
    found = run_module(monkeypatch, replicas=[replica(0, text=JSON)], root=root)
    assert found["failed"]
    assert "No such image" in found["msg"]
    found = run_module(monkeypatch, replicas=[replica(0, text=JSON)], root=root, _ansible_check_mode=True)
    assert found["results"][0]["status"] == "unknown"
    assert not (docker / "root").exists()


# --- The catalogue and the table ---


def versions() -> list[tuple[str, str]]:
    return [(kind, version) for kind, there in OPTIONS.items() for version in there]


@pytest.mark.parametrize(("kind", "version"), versions())
def test_what_an_adapter_renders_passes_the_lint_of_its_version(kind: str, version: str) -> None:
    chosen = {"max_model_len": 4096, "max_num_seqs": 8, "max_num_batched_tokens": 4096, "gpu_memory_utilization": 0.9}
    plan = replica_plan(engine=kind, engine_version=version, settings={**chosen, "scheduling_policy": "priority"})
    found = registry.adapter(kind).spec(context(plan, pool_plan(parallel={"tensor": 2, "pipeline": 2, "data": 1})))
    assert lint.lint(kind, version, {option.name: option.value for option in found.options}) == []


def test_a_version_without_a_catalogue_is_left_to_its_image() -> None:
    assert lint.lint("vllm", "0.99.0", {"nonsense": 1}) == []
    assert lint.lacking("vllm", "0.99.0", "nonsense") is None


@pytest.mark.parametrize(
    ("kind", "version", "name", "words"),
    [
        ("vllm", "0.26.0", "max_num_queued_reqs", "the gateway answers 429"),
        ("vllm", "0.32.0", "max_num_partial_prefills", "pools of their own"),
        ("vllm", "0.26.0", "swap_space", "kv_offloading_size"),
        ("vllm", "0.26.0", "enable_hierarchical_cache", "kv_offloading_size, kv_offloading_backend"),
        ("sglang", "0.5.23", "kv_offloading_size", "enable_hierarchical_cache, hicache_size"),
        ("sglang", "0.5.23", "radix_threshold", "every shared prefix is used"),
        ("triton_vllm", "0.32.0", "shutdown_timeout", "a drain at the gateway"),
        ("sglang", "0.5.23", "hicache_siz", "did you mean hicache_size?"),
    ],
)
def test_what_a_version_lacks_has_an_answer(kind: str, version: str, name: str, words: str) -> None:
    found = lint.lacking(kind, version, name)
    assert found is not None
    assert words in found[1]


def test_every_option_of_a_feature_exists_in_some_version_or_is_known_to_be_gone() -> None:
    there = {kind: {name for version in OPTIONS[kind] for name in lint.known(kind, version)} for kind in OPTIONS}
    gone = {"swap_space", "preemption_mode", "radix_threshold", "prefill_schedule_interval"}
    for feature in features.FEATURES:
        for name in feature.vllm:
            assert name in there["vllm"] or name in gone, name
        for name in feature.sglang:
            assert name in there["sglang"] or name in gone, name


def test_the_table_in_the_page_is_the_data() -> None:
    assert features.table() in (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")


def test_digest_is_in_every_job() -> None:
    assert in_image.jobs([replica(0)])[0].image.endswith(DIGEST)
