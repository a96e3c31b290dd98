"""The JSON Schema of shape manifests, for editors and for anyone who writes manifests by program."""

from __future__ import annotations

import json
from typing import Any

from tcache.manifest.model import Manifest

__all__ = ["json_schema", "schema_text"]


def json_schema() -> dict[str, Any]:
    """Return the schema, JSON Schema draft 2020-12.

    It accepts every manifest that tcache accepts. What it cannot say (names that are not bound, sizes that do not
    divide) only ``tcache manifest check`` finds.
    """
    found: dict[str, Any] = _published(Manifest.model_json_schema())
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "tcache shape manifest",
        **{key: value for key, value in found.items() if key != "title"},
    }


def _published(node: Any) -> Any:
    """Write out what the models do before they validate, and leave out titles that repeat a property's name."""
    if isinstance(node, list):
        return [_published(item) for item in node]
    if not isinstance(node, dict):
        return node
    made = {key: _published(value) for key, value in node.items() if not (key == "title" and isinstance(value, str))}
    if "patternProperties" in made:
        made["additionalProperties"] = False
    _same_for_all_releases(made)
    if made.pop("x-rejoined", False):  # YAML reads [cdiv(n, 16)] as two items
        made.pop("maxItems", None)
    if made.pop("x-single", False):  # one item may stand for a list of one
        described = {"description": made.pop("description")} if "description" in made else {}
        return {"anyOf": [made["items"], made], **described}
    return made


def _same_for_all_releases(made: dict[str, Any]) -> None:
    """Level what pydantic 2.7 and later releases write in different words."""
    if "patternProperties" in made:
        made.pop("propertyNames", None)
    if "const" in made:
        made.pop("enum", None)
    if len(made.get("allOf", [])) == 1:
        [only] = made.pop("allOf")
        described = dict(made)
        made.clear()
        made.update({**only, **described})


def schema_text() -> str:
    """Return the schema as the text of ``docs/manifest.schema.json``."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"
