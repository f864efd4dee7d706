"""No word on the command line gives a traceback: a run's settings come out, or one ConfigError."""

import copy
import functools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvtrain.config.compose import compose, schema
from hvtrain.config.schema import GROUPS, RunConfig, from_dict
from hvtrain.errors import ConfigError
from hvtrain.system.text import flatten

# The same examples in each run, so that a failure is of the code; no deadline, the machine may be busy.
FIXED = settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)

INFINITE, NO_NUMBER = float("inf"), float("nan")
HARD = [
    *(
        None,
        True,
        False,
        0,
        -1,
        -0.0,
        0.5,
        1,
        1.0,
        3,
        10**400,
        -(10**400),
        1e308,
        INFINITE,
        -INFINITE,
        NO_NUMBER,
    ),
    *(
        "",
        " ",
        "???",
        "null",
        "11h50m",
        "-1s",
        "1" * 5000 + "s",
        "a.b",
        ".",
        "\0",
        "\ud800",
        "${seed}",
    ),
    *(
        [],
        [0],
        [1, 2],
        [True],
        [10**400],
        [None],
        [[1]],
        {},
        {"a": 1},
        {1: 2},
        {"_target_": "a.b"},
        {None: None},
    ),
]
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(HARD),
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
)


@functools.cache
def default_tree():
    return compose([])


def checked(tree):
    """A run, or what is said in one line."""
    try:
        config = from_dict(tree)
    except ConfigError as error:
        assert str(error).strip()
        return
    assert isinstance(config, RunConfig)
    assert config.record.keys() == RunConfig(**{group: {} for group in GROUPS}).record.keys()


def changed(tree, name, value):
    """A tree with one setting, or group, changed."""
    first, _, rest = name.partition(".")
    if not rest:
        return {**tree, name: value}
    group = tree.get(first)
    return {**tree, first: changed(group if isinstance(group, dict) else {}, rest, value)}


def test_hard_values_at_every_setting():
    for name in [*flatten(default_tree()), *default_tree()]:
        for value in HARD:
            checked(changed(copy.deepcopy(default_tree()), name, value))


@settings(FIXED, max_examples=200)
@given(st.data())
def test_any_values_at_any_settings(data):
    tree = copy.deepcopy(default_tree())
    known = st.sampled_from([*flatten(tree), *tree])
    for _ in range(data.draw(st.integers(1, 3))):
        tree = changed(tree, data.draw(known | st.text("ab._", max_size=8)), data.draw(values))
    checked(tree)


names = st.one_of(
    st.sampled_from(sorted(flatten(schema()))),
    st.sampled_from(
        ["model", "dataset", "callbacks", "experiment", "optimizer.learning_rate", "dataset.dir"]
    ),
    st.sampled_from(
        ["+callbacks.x._target_", "~train", "checkpoint", "++seed", "x@y.z", "+train.x", "hydra.x"]
    ),
    st.text("abct._+~@/$", max_size=8),
)
texts = st.one_of(
    st.text(max_size=10),
    st.text("[]{}(),:$'\"\\=#%*! \t1e-.", max_size=10),
    st.sampled_from(
        [
            *(
                "",
                "null",
                "nan",
                "inf",
                "-1",
                "1e999",
                "9" * 400,
                "[1,2",
                "{a:1}",
                "${seed}",
                "${nothing}",
                "${run}",
            ),
            *(
                "${oc.env:NOT_THERE}",
                "!!python/object/apply:os.system ['true']",
                "a\0b",
                "\ud800",
                "'",
                "cnn",
                "[adam]",
            ),
        ]
    ),
)


def words_are_answered(arguments):
    try:
        checked(compose(arguments))
    except ConfigError as error:
        assert str(error).strip()


@settings(FIXED, max_examples=30)
@given(st.lists(st.tuples(names, texts).map("=".join), min_size=1, max_size=2))
def test_any_words(arguments):
    words_are_answered(arguments)


@pytest.mark.nightly
@settings(FIXED, max_examples=150)
@given(st.lists(st.tuples(names, texts).map("=".join), min_size=1, max_size=3))
def test_many_words(arguments):
    words_are_answered(arguments)
