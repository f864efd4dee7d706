"""BERT and GPT-2 of keras-hub on two ranks: exact, resumed with the same bits, begun with a preset, with LoRA."""

import keras
import numpy as np
import pytest
from safetensors.numpy import load_file

from hub_presets import save_preset
from launching import many_runs, without_hvtrain
from tiers import with_release

hub = pytest.importorskip(
    "keras_hub", reason="keras-hub is not installed; ./scripts/run pytest does it"
)
pytestmark = [pytest.mark.distributed, pytest.mark.nightly, pytest.mark.timeout(900)]

SIZE = {"num_layers": 1, "num_heads": 2, "hidden_dim": 32, "intermediate_dim": 64}
OPTIONS = [f"+model.backbone.{name}={value}" for name, value in SIZE.items()]
KINDS = {
    "BertTextClassifier": ["task=classification", "+dataset.language=false"],
    "GPT2CausalLM": ["task=language", "+dataset.language=true"],
}
COMMON = [
    "dataset._target_=texts.data",
    "+model.padding_token=0",
    "train.batch_size=8",
    "train.epochs=2",
]
# Without dropout one process and two ranks draw nothing of their own.
JOINT = [
    "model._target_=texts.model",
    "data.uneven=pad",
    "optimizer=momentum",
    "optimizer.learning_rate=0.01",
    "+model.backbone.dropout=0.0",
]


def words(name, *more):
    return ["model=keras_hub", f"model.name={name}", *KINDS[name], *COMMON, *more]


# A resume does not depend on the model.
RESUMED = ["GPT2CausalLM", pytest.param("BertTextClassifier", marks=pytest.mark.release)]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    backbone = hub.models.BertBackbone(vocabulary_size=100, max_sequence_length=16, **SIZE)
    save_preset(hub.models.BertTextClassifier(backbone, num_classes=5), folder / "preset")
    saved = ["checkpoint.every_steps=1", "checkpoint.keep=99", "train.validate_every_epochs=null"]
    runs = {}
    for name in KINDS:
        dropout = ["+model.dropout=0.0"] if name == "BertTextClassifier" else []
        runs |= {f"joint {name}": words(name, *OPTIONS, *JOINT, *dropout)}
        if name != RESUMED[0] and not with_release(request):
            continue
        runs |= {
            name: words(name, *OPTIONS, *saved),
            f"{name} in two": words(name, *OPTIONS, *saved, "train.steps=5"),
        }
        runs |= {f"{name} in two/again": words(name, *OPTIONS, *saved)}
    first = [f"model.preset={folder}/preset", "optimizer.learning_rate=1.0e-9", "train.steps=1"]
    runs["of preset"] = words("BertTextClassifier", *first)
    runs["with weights"] = words(
        "BertTextClassifier", *OPTIONS, f"model.weights={folder}/preset", *first[1:]
    )
    runs["of another size"] = words(
        "BertTextClassifier",
        *OPTIONS,
        "model.backbone.hidden_dim=16",
        f"model.weights={folder}/preset",
    )
    tuned = ["model.lora_rank=2", "train.ema=0.9", "train.rates={logits:2}", "train.remat=true"]
    runs["lora"] = words(
        "BertTextClassifier", f"model.preset={folder}/preset", "model.freeze=[*embedding*]", *tuned
    )
    ran: list[dict] = [{}, {}]
    output = ""
    # In several starts, since one may not take longer than a few minutes on a host with much else to do.
    for begin in range(0, len(runs), 3):
        some, printed = many_runs(
            "mpirun", 2, dict(list(runs.items())[begin : begin + 3]), folder, timeout=500
        )
        ran, output = [old | new for old, new in zip(ran, some)], output + printed
    return ran, output, folder, backbone


@pytest.mark.parametrize("name", KINDS)
def test_two_ranks_equal_one_process_on_the_joint_batches(results, name):
    for rank in results[0]:
        result = rank[f"joint {name}"]
        assert result["exact"] < 1e-5 < 1e-4 < result["uncorrected"]


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_goes_on_with_the_same_bits(results, name):
    ran, _, folder, _ = results
    for run in (name, f"{name} in two/again"):
        assert "record" in ran[0][run], ran[0][run]
    assert ran[0][f"{name} in two/again"]["record"]["first_step"] == 5
    file = "checkpoints/step-00000006/state.safetensors"
    whole, resumed = load_file(folder / name / file), load_file(folder / f"{name} in two" / file)
    assert whole.keys() == resumed.keys()
    for key in whole:
        np.testing.assert_array_equal(whole[key], resumed[key], key)


@pytest.mark.parametrize("run", ["of preset", "with weights"])
def test_two_ranks_begin_with_a_preset(results, run):
    ran, output, folder, backbone = results
    assert "record" in ran[0][run], ran[0][run]
    task = keras.models.load_model(folder / run / "model.keras").layers[-1].get_layer("task")
    for ours, other in zip(task.backbone.get_weights(), backbone.get_weights(), strict=True):
        np.testing.assert_allclose(ours, other, atol=1e-6)
    line = f"weights        13,440 parameters from {folder}/preset; new: task/logits/kernel (32, 2)"
    assert output.count(line) == 3, "on rank 0, for each run that begins with it"


def test_a_preset_that_differs_is_refused_by_the_first_variable(results):
    ran, _, folder, _ = results
    for rank in ran:
        assert rank["of another size"]["error"].startswith(
            f"ConfigError: model.weights={folder}/preset belongs to another model: it has shape "
        )


def test_lora_trains_matrices_and_the_head_and_leaves_a_plain_model(results):
    ran, _, folder, backbone = results
    assert "record" in ran[0]["lora"], ran[0]["lora"]
    printed = without_hvtrain(
        f"import keras; model = keras.models.load_model({str(folder / 'lora/model.keras')!r}); "
        "print(model.count_params(), [v.path for v in model.weights if 'lora' in v.path])",
        cwd=folder,
    )
    head = 32 * 2 + 2
    assert printed.split() == [str(backbone.count_params() + head), "[]"]
    task = keras.models.load_model(folder / "lora/model.keras").layers[-1].get_layer("task")
    same = [
        np.array_equal(a, b) for a, b in zip(task.backbone.get_weights(), backbone.get_weights())
    ]
    kernels = [weight.path.endswith("/kernel") for weight in backbone.weights]
    assert same == [not is_kernel for is_kernel in kernels], "kernels alone have changed"
