"""What the Hugging Face hub's files say of a data set: configurations, splits, class names.

They are read by the `datasets` library. Its guesses from names alone are not taken: see
docs/DATA.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets.data_files import resolve_pattern, sanitize_patterns
from datasets.info import DatasetInfo, DatasetInfosDict
from datasets.utils.metadata import MetadataConfigs
from huggingface_hub import DatasetCard

from recipe.data.files.formats import class_names
from recipe.data.files.part import is_arrow_folder
from recipe.data.layout.class_names import ClassNames
from recipe.errors import DataError, near

CARD, INFOS, INFO = "README.md", "dataset_infos.json", "dataset_info.json"


@dataclass(frozen=True, kw_only=True)
class Card:
    """What is said of the data in one folder."""

    folder: Path
    configurations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    default: str | None = None
    """The configuration that is taken where none is asked for."""
    features: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    """Configuration to the class names of its columns."""
    notes: Sequence[str] = ()

    def chosen(self, requested: Sequence[str]) -> list[str]:
        """The configurations that are read; none where the card has none with files.

        Raises:
            DataError: one that is asked for is not there, or none is and there are several.
        """
        known = [name for name, each in self.configurations.items() if "data_files" in each]
        if not known:
            return []
        for name in requested:
            if name not in known:
                raise DataError(
                    f"dataset_config_name has value {name!r}, but {self.folder / CARD} has the "
                    f"configurations {', '.join(known)}.",
                    near(name, known) or "Name one of them.",
                )
        if requested:
            return list(requested)
        if len(known) > 1 and self.default is None:
            raise DataError(
                f"{self.folder / CARD} has the configurations {', '.join(known)}, and none is the "
                "default.",
                "Name one, or several with commas, in the hyperparameter dataset_config_name.",
            )
        return [self.default or known[0]]

    def files(self, configuration: str) -> dict[str, list[Path]]:
        """The files of each of a configuration's splits, as the card calls them.

        Raises:
            DataError: the files do not lie here.
        """
        patterns = sanitize_patterns(self.configurations[configuration]["data_files"])
        files_of_split: dict[str, list[Path]] = {}
        for split, each in patterns.items():
            for pattern in each:
                if "://" in pattern:
                    raise DataError(
                        f"{self.folder / CARD} says that {split} lies at {pattern}.",
                        "Put the files into the channel, and their names into the card.",
                    )
                # What save_to_disk wrote is a folder, and the library looks for files.
                whole = [path for path in self.folder.glob(pattern) if is_arrow_folder(path)]
                files_of_split.setdefault(split, []).extend(whole)
                try:
                    paths = resolve_pattern(pattern, base_path=str(self.folder.resolve()))
                    inside = [Path(path).relative_to(self.folder.resolve()) for path in paths]
                except (FileNotFoundError, ValueError):  # Nothing there, or elsewhere.
                    continue
                files_of_split[split] += [self.folder / path for path in inside]
        return files_of_split

    def class_names(self, configurations: Sequence[str]) -> list[ClassNames]:
        """The names of the classes in the columns of some configurations, or of the only one."""
        known = [name for name in configurations if name in self.features]
        if not known and len(self.features) == 1:
            known = list(self.features)
        return [
            ClassNames(
                source=f"{self.folder}'s card",
                names=dict(enumerate(names)),
                column=column,
                numbered=True,
            )
            for name in known
            for column, names in self.features[name].items()
        ]


def read(folder: Path) -> Card | None:
    """What README.md's front matter, dataset_infos.json and dataset_info.json of a folder say.

    What cannot be read of them becomes a note.
    """
    infos: dict[str, DatasetInfo] = {}
    notes = []
    configurations, default = MetadataConfigs(), None
    for name in (INFO, INFOS, CARD):
        path = folder / name
        if not path.is_file() or (name == CARD and path.read_bytes()[:3] != b"---"):
            continue
        try:
            if name == CARD:
                data = DatasetCard.load(path).data
                configurations = MetadataConfigs.from_dataset_card_data(data)
                default = configurations.get_default_config_name()
                infos.update(DatasetInfosDict.from_dataset_card_data(data))
            else:
                document = json.loads(path.read_text("utf-8"))
                of_all = {"default": document} if name == INFO else document
                infos |= {key: DatasetInfo.from_dict(each) for key, each in of_all.items()}
        except Exception as error:  # The library raises all kinds.
            reason = " ".join(str(error).split())[:200]
            notes.append(f"{path} cannot be read as a data set's card, and is not: {reason}.")
    features = {
        key: {column: names for column, names in class_names(info.features).items() if names}
        for key, info in infos.items()
        if info.features
    }
    if not (configurations or features or notes):
        return None
    return Card(
        folder=folder, configurations=configurations, default=default, features=features,
        notes=notes,
    )  # fmt: skip
