"""What a client may ask of an answer's form: OpenAI's `response_format`, and `structured_outputs` as vLLM spells it."""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from dp_engine.messages import Grammar
from launcher.front.strict import Strict, character_text

Characters = Annotated[str, AfterValidator(character_text)]


def _schema_text(schema: Any) -> str:
    """The order of properties is the order in which the model writes them, so it stays."""
    if not isinstance(schema, dict):
        raise ValueError("must be a JSON schema, which is an object")
    try:
        return json.dumps(schema)
    except RecursionError:
        raise ValueError("the schema is too deeply nested") from None


def _schema_or_text(schema: Any) -> str:
    return character_text(schema) if isinstance(schema, str) else _schema_text(schema)


class JsonSchema(Strict):
    """`strict` makes no difference: the schema always binds. Without a schema any JSON object will do."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_: Annotated[str, BeforeValidator(_schema_text)] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("`json_schema` belongs to the type json_schema, and is needed there")
        return self

    def grammar(self) -> Grammar | None:
        if self.type == "text":
            return None
        if self.json_schema is None or self.json_schema.schema_ is None:
            return Grammar("json_object")
        return Grammar("json_schema", self.json_schema.schema_)


class StructuredOutputs(Strict):
    """vLLM's `structured_outputs`, of which exactly one is given. `json` is a schema or its text, `grammar` is in GBNF
    or Lark syntax."""

    json_: Annotated[str, BeforeValidator(_schema_or_text)] | None = Field(None, alias="json")
    regex: Characters | None = None
    choice: list[Characters] | None = Field(None, min_length=1)
    grammar_: Characters | None = Field(None, alias="grammar")
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _has_one(self) -> "StructuredOutputs":
        if sum(value is not None for value in dict(self).values()) != 1:
            raise ValueError("exactly one of `json`, `regex`, `choice`, `grammar` and `json_object` is needed")
        return self

    def grammar(self) -> Grammar:
        if self.json_ is not None:
            return Grammar("json_schema", self.json_)
        if self.regex is not None:
            return Grammar("regex", self.regex)
        if self.choice is not None:
            return Grammar("choice", json.dumps(self.choice))
        if self.grammar_ is not None:
            return Grammar("ebnf", self.grammar_)
        return Grammar("json_object")
