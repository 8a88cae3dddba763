# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Judge an engine's configuration inside the image that will run it. Stand-alone: it is handed to the image's Python.

    python3 image_lint.py KIND MODEL_DIR FILE...     # kind: vllm, sglang, triton_vllm; MODEL_DIR: config.json, tokenizer
    python3 image_lint.py KIND --describe            # the options of the engine in this image, with their types

One JSON object on standard output, whatever the engine prints meanwhile; exit code 0: nothing wrong, 1: problems, 2: the
image holds no such engine. No GPU, no network and no weights are needed. Three steps, each only after the one before it:
names and types by ``judge``, the engine's own parser, and the engine's own configuration object built from config.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
import json
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NEAR = 0.6
LONGEST_TEXT = 600
MOST_COMPILED = 16


@dataclass(frozen=True)
class Known:
    """An option of an engine. ``kind``: int, float, bool, str, json, list or any; ``negatable``: there is a --no- form."""

    kind: str
    choices: tuple[str, ...] = ()
    negatable: bool = True


@dataclass(frozen=True)
class Problem:
    """What is wrong with one option (``""``: with all of them together), at which step, and what would be right."""

    option: str
    value: Any
    step: str
    problem: str
    right: str = ""


def judge(config: Mapping[Any, Any], known: Mapping[str, Known], dashes: bool = True) -> list[Problem]:
    """Return what names and types of a configuration tell. ``dashes``: names may have dashes for underscores.

    Abbreviations, which argparse would take, are refused; so is ``false`` for an option that has no --no- form, which
    engines drop without a word.
    """
    found: list[Problem] = []
    for key, value in config.items():
        name = str(key).replace("-", "_") if dashes else str(key)
        option = known.get(name)
        if option is None:
            found.append(_unknown(str(key), name, value, known))
            continue
        said = _type_problem(value, option)
        if said:
            found.append(Problem(str(key), value, "type", *said))
    return found


def _unknown(key: str, name: str, value: Any, known: Mapping[str, Known]) -> Problem:
    longer = sorted(option for option in known if name and option.startswith(name))
    if longer:
        return Problem(key, value, "name", "is an abbreviation, which the engine would guess at", f"write {longer[0]}")
    near = difflib.get_close_matches(name.lstrip("_"), list(known), 1, NEAR)
    return Problem(key, value, "name", "is no option of this engine", f"nearest: {near[0]}" if near else "remove it")


def _type_problem(value: Any, option: Known) -> tuple[str, str] | None:
    """Return (problem, right) of a value, None where it is fine."""
    kind = option.kind
    if value is None:
        return "has no value", "give it one or remove it"
    if kind == "bool":
        if not isinstance(value, bool):
            return f"is {value!r}", "write true or false, without quotes"
        if not value and not option.negatable:
            return "is false, which the engine drops: there is no such switch to turn off", "remove it"
        return None
    if isinstance(value, bool):
        return None if kind == "any" else (f"is {value!r}", f"write {_WORDS[kind]}")
    if kind in ("int", "float"):
        wanted = int if kind == "int" else (int, float)
        if isinstance(value, str) and _is_number(value):
            return f"is the text {value!r}", "write the number without quotes"
        if not isinstance(value, wanted):
            return f"is {value!r}", f"write {_WORDS[kind]}"
    if kind == "str" and isinstance(value, (Mapping, list)):
        return "is a list or a mapping", "write one word"
    if kind == "json" and not isinstance(value, (Mapping, list, str)):
        return f"is {value!r}", "write a mapping"
    if option.choices and not isinstance(value, (Mapping, list)) and str(value) not in option.choices:
        return f"is {value!r}", f"write one of {', '.join(option.choices)}"
    return None


_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a word",
    "json": "a mapping",
    "list": "a list",
}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# --- What the engine in this image knows ---


def kind_of(action: argparse.Action) -> Known:
    """Return what an option of a parser takes, by asking its own type function."""
    negatable = any(text.startswith("--no-") for text in action.option_strings)
    choices = tuple(str(choice) for choice in action.choices) if action.choices else ()
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return Known("bool", (), negatable)
    if action.nargs in ("+", "*") or (isinstance(action.nargs, int) and action.nargs > 1):
        return Known("list", ())
    return Known(_kind_of_type(action.type), choices)


def _kind_of_type(function: Any) -> str:
    if function in (None, str):
        return "str"

    def result(text: str) -> Any:
        try:
            return function(text)
        except Exception:  # whatever a parser's function raises, it does not take this text
            return None

    number, broken, word, mapping = (result(text) for text in ("7", "7.5", "word", "{}"))
    if mapping is not None and not isinstance(mapping, str):
        return "json" if word is None else "any"
    if word is not None and isinstance(number, (int, float)):
        return "any"
    if isinstance(broken, float) and broken == 7.5:
        return "float"
    if isinstance(number, int) and not isinstance(number, bool):
        return "int"
    return "str" if isinstance(word, str) else "any"


def options_of(parser: argparse.ArgumentParser) -> dict[str, Known]:
    """Return a parser's options by their long names, with underscores."""
    found: dict[str, Known] = {}
    for text, action in parser._option_string_actions.items():
        if text.startswith("--") and not text.startswith("--no-") and text != "--help":
            found[text[2:].replace("-", "_")] = kind_of(action)
    return found


class _RefusedError(Exception):
    """The engine's parser refuses the arguments."""


def _strict(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Return the parser, raising instead of leaving."""

    def refuse(message: str = "", *_args: Any) -> Any:
        raise _RefusedError(message)

    parser.error = refuse  # type: ignore[method-assign]
    parser.exit = lambda status=0, message=None: refuse(str(message or status))  # type: ignore[method-assign]
    return parser


def _first(places: Sequence[tuple[str, str]]) -> Any:
    """Return the first attribute that exists of (module, attribute) pairs: engines move their parsers about."""
    last: Exception | None = None
    for module, name in places:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            last = error
    raise ImportError(str(last))


def _without_driver(name: str, compiled: str) -> Any:
    """Import a module, with empty modules for the compiled ones (names that begin with ``compiled``) that do not load here.

    Some need the driver's libraries, which only a container with a GPU has. Raises ImportError for anything else.
    """
    for _attempt in range(MOST_COMPILED):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            if not (error.name or "").startswith(compiled):
                raise
            sys.modules[str(error.name)] = types.ModuleType(str(error.name))
    raise ImportError(f"{name}: more than {MOST_COMPILED} compiled modules do not load")


def _plain_models() -> None:
    """Take every model for a plain text generator: its class, which vLLM would look at, imports GPU kernels."""
    registry = importlib.import_module("vllm.model_executor.models.registry")
    torch = importlib.import_module("torch")
    plain = dataclasses.replace(
        registry._ModelInfo.from_model_cls(torch.nn.Module), is_text_generation_model=True, supports_pp=True
    )

    def inspect(self: Any) -> Any:
        return dataclasses.replace(plain, architecture=self.class_name)

    registry._LazyRegisteredModel.inspect_model_cls = inspect


class Vllm:
    """vLLM as it is in this image: ``--config`` files of its server."""

    dashes = True

    def __init__(self) -> None:
        """Find parser and engine arguments. Raises ImportError where there are none."""
        self.version = str(importlib.import_module("vllm.version").__version__)
        self.arguments = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs
        self.flexible = _first(
            [("vllm.utils.argparse_utils", "FlexibleArgumentParser"), ("vllm.utils", "FlexibleArgumentParser")]
        )
        self.note = self._platform()
        self.make = _first(
            [
                ("vllm.entrypoints.common.cli_args", "make_arg_parser"),
                ("vllm.entrypoints.launchers.cli_args", "make_arg_parser"),
                ("vllm.entrypoints.openai.cli_args", "make_arg_parser"),
            ]
        )

    @staticmethod
    def _platform() -> str:
        """Put a stand-in in place of a GPU that this container does not see; return the note that says so."""
        platforms: Any = importlib.import_module("vllm.platforms")
        if not platforms.current_platform.is_unspecified():
            return ""
        cuda = _without_driver("vllm.platforms.cuda", "vllm._")
        interface = importlib.import_module("vllm.platforms.interface")

        class Hopper(cuda.NonNvmlCudaPlatform):  # type: ignore[name-defined]
            """A card of compute capability 9.0 with 80 GiB."""

            @classmethod
            def get_device_capability(cls, device_id: int = 0) -> Any:
                return interface.DeviceCapability(9, 0)

            @classmethod
            def get_device_name(cls, device_id: int = 0) -> str:
                return "NVIDIA H100"

            @classmethod
            def get_device_total_memory(cls, device_id: int = 0) -> int:
                return 80 * 1024**3

            @classmethod
            def device_count(cls) -> int:
                return 64

        # Modules that took the platform by name before must see the stand-in as well.
        old = platforms.current_platform
        platforms._current_platform = Hopper()
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("vllm.") and vars(module).get("current_platform") is old:
                module.current_platform = platforms._current_platform  # type: ignore[attr-defined]
        _plain_models()
        return "no GPU in sight: a card of compute capability 9.0 stands in for it"

    def parser(self) -> argparse.ArgumentParser:
        """Return the server's parser."""
        made: argparse.ArgumentParser = self.make(self.flexible(prog="vllm"))
        return made

    def known(self) -> dict[str, Known]:
        """Return its options."""
        return options_of(self.parser())

    def parse(self, path: str) -> Any:
        """Return the engine arguments that a file leads to. Raises what the parser raises."""
        given = _strict(self.parser()).parse_args(["--config", path])
        return self.arguments.from_cli_args(given)

    def build(self, arguments: Any, model: str) -> None:
        """Build the engine's configuration on config.json. Raises what the engine raises."""
        arguments.model = model
        if arguments.load_format == "auto":
            arguments.load_format = "dummy"
        arguments.create_engine_config()


class TritonVllm(Vllm):
    """vLLM under Triton: every key of model.json is a field of its engine arguments."""

    dashes = False

    def known(self) -> dict[str, Known]:
        """Return the fields, with the types that the parser has for them."""
        made = self.flexible(prog="vllm")
        self.arguments.add_cli_args(made)
        kinds = {action.dest: kind_of(action) for action in made._actions}
        names = [field.name for field in dataclasses.fields(self.arguments)]
        return {name: dataclasses.replace(kinds.get(name, Known("any")), negatable=True) for name in names}

    def parse(self, path: str) -> Any:
        """Return the engine arguments that model.json leads to."""
        return self.arguments(**read(path))


class Sglang:
    """SGLang as it is in this image: ``--config`` files of its server."""

    dashes = True
    note = ""

    def __init__(self) -> None:
        """Find parser and server arguments. Raises ImportError where there are none."""
        self.version = str(importlib.import_module("sglang.version").__version__)
        self.arguments = importlib.import_module("sglang.srt.server_args").ServerArgs

    def parser(self) -> argparse.ArgumentParser:
        """Return the server's parser."""
        made = argparse.ArgumentParser(prog="sglang")
        self.arguments.add_cli_args(made)
        return made

    def known(self) -> dict[str, Known]:
        """Return its options."""
        return options_of(self.parser())

    def parse(self, path: str) -> Any:
        """Return the server arguments that a file leads to, joined as its launcher joins them."""
        merger = _first(
            [
                ("sglang.srt.utils.server_args_config_parser", "ConfigArgumentMerger"),
                ("sglang.srt.server_args_config_parser", "ConfigArgumentMerger"),
            ]
        )
        parser = _strict(self.parser())
        return self.arguments.from_cli_args(
            parser.parse_args(merger(parser).merge_config_with_args(["--config", path]))
        )

    def build(self, arguments: Any, model: str) -> None:
        """Resolve the arguments as a start does. Raises what the engine raises."""
        arguments.model_path = model
        resolve = getattr(arguments, "resolve_once", None)
        if resolve is not None:
            resolve()


ENGINES: Mapping[str, Callable[[], Any]] = {"vllm": Vllm, "sglang": Sglang, "triton_vllm": TritonVllm}


def read(path: str) -> Any:
    """Return the content of a YAML or JSON file."""
    with open(path, encoding="utf-8") as stream:
        if path.endswith(".json"):
            return json.load(stream)
        return importlib.import_module("yaml").safe_load(stream)


def said(error: BaseException) -> str:
    """Return what an error says, on one line; of a pydantic error the sentences alone."""
    errors = getattr(error, "errors", None)
    if callable(errors):
        try:
            parts = [f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg', '')}".strip(": ") for one in errors()]
            return "; ".join(parts)[:LONGEST_TEXT]
        except Exception:  # not pydantic's after all: take the text
            return str(error)[:LONGEST_TEXT]
    return (" ".join(str(error).split()) or type(error).__name__)[:LONGEST_TEXT]


def check(engine: Any, known: Mapping[str, Known], model: str, path: str) -> dict[str, Any]:
    """Return {file, problems, checked, skipped} for one file."""
    checked: list[str] = []
    skipped: list[str] = []

    def result(problems: list[Problem]) -> dict[str, Any]:
        return {
            "file": path,
            "problems": [dataclasses.asdict(one) for one in problems],
            "checked": checked,
            "skipped": skipped,
        }

    try:
        config = read(path)
    except Exception as error:  # any fault of the file is the finding
        return result([Problem("", None, "file", f"cannot be read: {said(error)}")])
    if not isinstance(config, dict):
        return result([Problem("", None, "file", "holds no mapping", "write one option a line")])
    checked.extend(["names", "types"])
    problems = judge(config, known, engine.dashes)
    if problems:
        return result(problems)
    try:
        arguments = engine.parse(path)
    except Exception as error:  # whatever the engine raises is the finding
        return result([Problem("", None, "parse", said(error))])
    checked.append("parser")
    if not os.path.isfile(os.path.join(model, "config.json")):
        skipped.append(f"semantic check: there is no config.json in {model}")
        return result([])
    try:
        engine.build(arguments, model)
    except Exception as error:  # whatever the engine raises is the finding, where it speaks of the configuration
        # Not the configuration's fault: something that only a container with a GPU, or with weights, has.
        foreign = isinstance(error, (ImportError, AttributeError, OSError)) or (
            engine.note and error.__class__ is RuntimeError
        )
        if not foreign:
            return result([Problem("", None, "semantic", said(error))])
        skipped.append(f"semantic check: {said(error)}")
        return result([])
    checked.append("semantic")
    if engine.note:
        skipped.append(engine.note)
    return result([])


def run(arguments: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Return (report, exit code) for a command line without the program's name."""
    kind, rest = arguments[0], arguments[1:]
    try:
        engine = ENGINES[kind]()
    except ImportError as error:
        return {"kind": kind, "error": f"the image holds no {kind} that can be asked: {said(error)}"}, 2
    known = engine.known()
    report: dict[str, Any] = {"kind": kind, "version": engine.version}
    if rest[0] == "--describe":
        report["options"] = {name: dataclasses.asdict(option) for name, option in sorted(known.items())}
        return report, 0
    report["files"] = [check(engine, known, rest[0], path) for path in rest[1:]]
    return report, 1 if any(one["problems"] for one in report["files"]) else 0


def main() -> int:
    """Run it, keeping standard output for the report alone."""
    if len(sys.argv) < 3 or sys.argv[1] not in ENGINES:
        sys.stderr.write(f"{(__doc__ or '').strip()}\n")
        return 2
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    report, code = run(sys.argv[1:])
    answer.write(json.dumps(report, default=str) + "\n")
    answer.flush()
    # Engines leave threads behind that would hold the interpreter.
    os._exit(code)


if __name__ == "__main__":
    raise SystemExit(main())
