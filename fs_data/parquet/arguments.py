"""What a dataset is made with: checked before anything is read."""

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, SupportsIndex

from fs_data.parquet.convert import Vocabulary


def whole(name: str, value: SupportsIndex, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {value!r}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


def quotas_of(source: Any) -> list[tuple[Any, float]]:
    """Sources with their quotas."""
    sources: list[tuple[Any, float]] = list(source.items()) if isinstance(source, Mapping) else [(source, 1.0)]
    if not sources or not all(0 < quota < float("inf") for _, quota in sources):
        raise ValueError(
            f"quotas must be more than 0 and finite, got {dict(sources)}; leave out a source to read none of it"
        )
    return sources


def names_of(columns: Sequence[str] | None) -> list[str] | None:
    if columns is None:
        return None
    names = [columns] if isinstance(columns, str) else list(columns)
    if isinstance(columns, str) or not names or len(set(names)) < len(names):
        raise ValueError(f"columns must be a list of at least one name, each once, got {columns!r}; None reads all")
    return names


def vocabularies_of(given: Mapping[str, Iterable[Any]] | None) -> dict[str, Vocabulary]:
    found: dict[str, Vocabulary] = {}
    for name, texts in (given or {}).items():
        if isinstance(texts, (str, Set)):
            raise ValueError(
                f"vocabularies must give {name!r} a list, whose order numbers the texts, got {texts!r}; sort it"
            )
        given_texts = list(texts)
        if others := [text for text in given_texts if not isinstance(text, str)]:
            raise ValueError(f"vocabularies must give {name!r} texts, got {others[0]!r}")
        found[name] = given_texts
    return found
