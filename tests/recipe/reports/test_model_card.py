"""The card's front matter, as the hub's own library reads it."""

import pytest
from huggingface_hub import ModelCard

from recipe.data.labels import Labels
from recipe.hyperparameters import Hyperparameters
from recipe.reports import model_card
from recipe.reports.model_card import Facts


@pytest.mark.parametrize(
    ("name", "is_local", "expected"),
    [
        ("google-bert/bert-base-uncased", False, "google-bert/bert-base-uncased"),
        ("/opt/ml/input/data/model", True, None),
        ("models/bert: small", True, None),
    ],
)
def test_it_names_the_base_model_where_the_hub_has_it(
    name: str, is_local: bool, expected: str | None
) -> None:
    facts = Facts(
        base_model=name,
        base_is_local=is_local,
        hyperparameters=Hyperparameters(
            hf_token="hf_planted", hub_model_id="https://me:hf_planted@host/a"
        ).as_text(),
        about=model_card.describe_classifier(Labels(("no", "yes")), ("text",)),
        decisions=[("data", "4 rows")],
        metrics={"eval_accuracy": 0.25},
    )
    written = model_card.write(facts)
    card = ModelCard(written)
    assert card.data.base_model == expected
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-classification"
    assert f"Fine-tuned from `{name}` to classify texts by 2 labels" in card.text
    assert "| decision | value |\n|---|---|\n| data | 4 rows |\n" in card.text
    assert "| metric | value |\n|---|---|\n| eval_accuracy | 0.25 |\n" in card.text
    assert "hf_planted" not in written
