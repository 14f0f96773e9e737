"""Anything at all where options, budgets, formats, traces and tensors are expected: it is taken or refused by name.

Inputs are drawn by hypothesis, with the same seed in every run; what once failed belongs into an @example."""

import json
import math

import pytest
import torch
from cache_case import CacheCase
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from locks import ops
from locks.budget import parse_budget
from locks.comparison import Plan
from locks.formats import Format
from locks.trace import Trace, TraceError
from trace_case import METADATA, write_small_trace

from locks_vllm.options import LocksOptions, options_of, parse_options

same_in_every_run = settings(
    derandomize=True, deadline=None, max_examples=300, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4)
)
names = st.sampled_from(["fine", "fine8", "auto", "b4r1m4v4c4", "b16r8m8v4c4-plain"])
near_options = st.fixed_dictionaries(
    {},
    optional={
        "budget": st.sampled_from(["all", 1, 2048, 0.5, "0.02"]) | json_values,
        "formats": names | st.dictionaries(st.sampled_from(["default", "0", "17", "x"]), names | scalars) | json_values,
        "dense_layers": st.lists(st.integers(0, 40), max_size=4) | json_values,
        "reference_keys": scalars,
        "evaluate": scalars,
        "dense_tokens": scalars,
        "score_tokens": scalars,
    },
)


@same_in_every_run
@given(json_values | near_options)
@example({"reference_keys": "~0"})  # no user of this name
def test_options_are_taken_or_refused_by_name(values):
    try:
        options = parse_options(values)
    except ValueError as error:
        assert "locks" in str(error) and ("expected" in str(error) or "allowed are" in str(error)), error
        return
    assert isinstance(options, LocksOptions)
    assert 0 < options.budget
    assert all(name == "auto" or Format.parse(name) for name in options.formats.values())
    # What is taken from the command line is taken from JSON as well.
    assert options_of(json.loads(json.dumps({"locks": values}))) == options


@same_in_every_run
@given(scalars | st.fractions() | st.decimals() | st.binary(max_size=5))
def test_a_budget_is_in_its_range_or_refused(value):
    try:
        budget = parse_budget(value)
    except ValueError as error:
        assert "expected" in str(error)
        return
    assert 0 < budget < 1 or budget >= 1 and (math.isinf(budget) or budget.is_integer())


@same_in_every_run
@given(st.text(max_size=30) | st.from_regex(r"b\d{1,3}r\d{1,3}m\d{1,3}v\d{1,3}c\d{1,3}(-plain)?", fullmatch=True))
def test_a_format_survives_its_name_or_is_refused(name):
    try:
        form = Format.parse(name)
    except ValueError as error:
        assert "expected" in str(error)
        return
    assert Format.parse(form.name) == form


@same_in_every_run
@given(st.text(max_size=20), st.text(max_size=20), st.text(max_size=20))
def test_a_comparison_is_planned_or_refused(selectors, formats, budgets):
    try:
        Plan.parse(selectors, formats, budgets)
    except (ValueError, RuntimeError) as error:
        assert "expected" in str(error)


@pytest.fixture(scope="module")
def trace_bytes(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "valid.safetensors"
    return write_small_trace(path, metadata=METADATA | {"depth": "0.5"}).read_bytes()


def read_all(path):
    trace = Trace(path)
    for layer in trace.layers:
        for head in trace.heads(layer):
            assert torch.isfinite(head.keys).all() and head.positions.max() < head.keys.shape[0]


edits = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=6)


@same_in_every_run
@given(edits, st.booleans(), st.floats(0, 1))
def test_a_spoiled_trace_is_read_or_refused(tmp_path_factory, trace_bytes, edits, in_header, kept):
    data = bytearray(trace_bytes)
    header = 8 + int.from_bytes(data[:8], "little")
    for place, value in edits:
        data[int(place * (header if in_header else len(data)))] = value
    path = tmp_path_factory.getbasetemp() / "spoiled.safetensors"
    path.write_bytes(data[: max(1, int(kept * len(data)))] if kept < 0.5 else data)
    try:
        read_all(path)
    except TraceError as error:
        assert str(path) in str(error)


@same_in_every_run
@given(
    st.dictionaries(
        st.sampled_from(["layers", "scale", "kv_heads", "answer_spans", "depth", "repeat_chunks"]),
        st.text(max_size=12) | st.from_regex(r"[0-9:,+.e-]{0,16}", fullmatch=True), max_size=6,
    )
)  # fmt: skip
def test_any_metadata_is_read_or_refused(tmp_path_factory, trace_bytes, metadata):
    header = 8 + int.from_bytes(trace_bytes[:8], "little")
    table = json.loads(trace_bytes[8:header])
    table["__metadata__"] |= metadata
    text = json.dumps(table).encode()
    path = tmp_path_factory.getbasetemp() / "metadata.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + trace_bytes[header:])
    try:
        read_all(path)
    except TraceError as error:
        assert str(path) in str(error)


# What is done to a tensor; the arguments that are no tensors get any number.
CHANGES = {
    "part": lambda t, n: t.narrow(n % t.dim(), 0, t.shape[n % t.dim()] // 2),
    "empty": lambda t, n: t.narrow(n % t.dim(), 0, 0),
    "every second": lambda t, n: t[(slice(None),) * (n % t.dim()) + (slice(None, None, 2),)],
    "turned": lambda t, n: t.transpose(n % t.dim(), (n // 4) % t.dim()),
    "one for all": lambda t, n: t.narrow(n % t.dim(), 0, 1).expand(t.shape),
    "another dimension": lambda t, n: t.unsqueeze(n % t.dim()),
    "a dimension less": lambda t, n: t.select(n % t.dim(), 0),
    "another type": lambda t, n: t.to([torch.int64, torch.float64, torch.float16, torch.uint8, torch.bool][n % 5]),
    "any number": lambda t, n: torch.full_like(t, n % 251 - 9 * t.dtype.is_signed),
    "no tensor": lambda t, n: None,
}
CASE = CacheCase()


@same_in_every_run
@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from(sorted(CHANGES)), st.integers(0, 2**31)), min_size=1, max_size=3
    ),
    st.sampled_from([math.inf, 120.0, 0.5]),
)
def test_a_changed_argument_of_an_operator_is_taken_or_refused(changes, budget):
    # Every tensor is a copy of its own: a wrong access shows as a crash here, and in the sanitizers' tests of the core.
    for name, call, arguments in (
        ("summarise_blocks", ops.summarise_blocks, CASE.summarise_arguments()),
        ("decode", ops.decode, CASE.decode_arguments(budget)),
    ):
        arguments = {key: value.clone() if torch.is_tensor(value) else value for key, value in arguments.items()}
        for place, change, number in changes:
            key = sorted(arguments)[place % len(arguments)]
            value = arguments[key]
            if torch.is_tensor(value) and value.dim() and value.numel():
                arguments[key] = CHANGES[change](value, number)
            elif not torch.is_tensor(value) and value is not None:
                arguments[key] = type(value)(number)
        try:
            call(**arguments)
        except (RuntimeError, TypeError) as error:
            assert name in str(error), error
