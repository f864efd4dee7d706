"""Writes a model card for the Hugging Face Hub (README.md with a YAML header), and uploads an exported model.

Keras itself loads the exported folder, from disk or from the Hub as hf://USER/NAME.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import yaml

from hvtrain.errors import ConfigError, in_one_line

CARD_FILE = "README.md"
REPO = re.compile(r"hf://([\w.-]+/[\w.-]+)")
# Size of a dimension that may vary, in the usage example, unless the model takes less.
EXAMPLE_SIZE = 64
# The Hub's names for our tasks. Its name for classification applies only to images.
TASKS = {
    "classification": "image-classification",
    "segmentation": "image-segmentation",
    "language": "text-generation",
}
CARD = """\
---
{{ header }}---

# {{ name }}

A model for {{ task }}
{%- if result.num_parameters %} with {{ "{:,}".format(result.num_parameters) }} parameters{% endif %}
, trained on {{ facts.dataset }} with hvtrain (checkpoint {{ facts.checkpoint }}).

{% if metrics %}
| metric | value |
|---|---|
{% for key, value in metrics.items() %}
| {{ key }} | {{ "%.4g" | format(value) }} |
{% endfor %}
{% else %}
This checkpoint was not evaluated on test data.
{% endif %}

## Use

```python
import keras
import tensorflow as tf

model = keras.saving.load_model("{{ address }}")
inputs = {{ example }}
outputs = model(inputs)
```

Inputs: {{ values }}. Outputs: {{ facts.output["values"] }}.
{%- if facts.class_names %} Classes, in output order: {{ facts.class_names | join(", ") }}.{% endif %}

"""


def model_card(
    facts: Mapping[str, Any], result: Mapping[str, Any], task: str, is_image: bool, address: str
) -> str:
    """Returns an exported model's card as Markdown with a YAML header.

    Args:
        facts: The description that is written beside the model.
        result: The run's result.json; its metrics are shown if they belong to this checkpoint.
        task: The name of the task.
        is_image: True if the inputs are images.
        address: The folder of the model, or hf://USER/NAME.
    """
    inputs = facts["input"]
    name = address.rpartition("/")[2]
    metrics = checkpoint_metrics(result, facts["checkpoint"])
    pipeline = TASKS.get(task) if is_image or task != "classification" else None
    header: dict[str, Any] = {"library_name": "keras", "tags": ["keras", "hvtrain", task]}
    if pipeline:
        header["pipeline_tag"] = pipeline
    if metrics:
        entries = [
            {"type": metric.removeprefix("test_"), "name": metric, "value": value}
            for metric, value in metrics.items()
        ]
        dataset = {"name": facts["dataset"], "type": facts["dataset"]}
        results = [{"task": {"type": pipeline or task}, "dataset": dataset, "metrics": entries}]
        header["metrics"] = [entry["type"] for entry in entries]
        header["model-index"] = [{"name": name, "results": results}]

    # Several inputs are described by the example only.
    value_range = inputs.get("values") if _is_array(inputs) else None
    # The template copes with an empty result: an unfinished run has none.
    return jinja2.Template(CARD, trim_blocks=True, keep_trailing_newline=True).render(
        header=yaml.safe_dump(header, sort_keys=False, allow_unicode=True),
        name=name,
        task=task,
        facts=facts,
        result=result,
        metrics=metrics,
        address=address,
        example=example_code(inputs, min(EXAMPLE_SIZE, facts.get("length") or EXAMPLE_SIZE)),
        values=value_range or "as in the example",
    )


def checkpoint_metrics(result: Mapping[str, Any], checkpoint: str) -> dict[str, float]:
    """Returns the test metrics of a checkpoint; empty if the run did not test it."""
    step = int(checkpoint.rpartition("-")[2])
    tested = {result.get("num_steps"): result.get("metrics")}
    best = result.get("best") or {}
    tested[best.get("step")] = best.get("metrics")
    return tested.get(step) or {}


def _is_array(spec: Any) -> bool:
    """True for the spec of a single array; other specs are dicts or lists of several inputs."""
    return isinstance(spec, dict) and isinstance(spec.get("dtype"), str)


def example_code(spec: Any, varying_size: int = EXAMPLE_SIZE) -> str:
    """Returns Python code that makes example inputs for a model: zeros or empty strings.

    varying_size: the size of a dimension that may vary.

    >>> example_code({"age": {"shape": [1], "dtype": "float32"}})
    '{"age": tf.zeros([1, 1], "float32")}'
    """
    if not isinstance(spec, dict):
        return f"[{', '.join(example_code(part, varying_size) for part in spec)}]"
    if _is_array(spec):
        shape = [1, *(size or varying_size for size in spec["shape"])]
        return f'tf.zeros({shape}, "{spec["dtype"]}")'
    parts = [
        f"{json.dumps(name)}: {example_code(part, varying_size)}" for name, part in spec.items()
    ]
    return f"{{{', '.join(parts)}}}"


def open_hub(repo: str) -> Any:
    """Returns a client that is logged in to the Hub.

    Raises:
        ConfigError: The package or the login is missing, or the address is wrong.
    """
    if not REPO.fullmatch(repo):
        raise ConfigError(f"repo={repo} is not a Hub address; give hf://USER/NAME")
    try:
        from huggingface_hub import HfApi

        api = HfApi(library_name="keras")
        api.whoami()
    except ImportError as error:
        raise ConfigError(
            f"repo={repo} needs the package huggingface_hub ({error}); install it"
        ) from error
    except Exception as error:  # Network and login errors are of many types.
        raise ConfigError(
            f"repo={repo} cannot be used: {in_one_line(error)}; if you are not logged in, run: hf auth login"
        ) from error
    return api


def upload(api: Any, folder: Path, repo: str) -> None:
    """Uploads an exported folder, creating its repository if needed. Raises ConfigError if that fails."""
    name = repo.removeprefix("hf://")
    try:
        api.create_repo(name, exist_ok=True)
        api.upload_folder(
            repo_id=name, folder_path=folder, commit_message="Upload a model trained with hvtrain"
        )
    except Exception as error:  # Network and login errors are of many types.
        raise ConfigError(
            f"{folder} was written, but not uploaded to {repo}: {in_one_line(error)}; to try again: "
            f"hf upload {name} {folder}"
        ) from error
