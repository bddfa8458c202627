"""The base of every settings class: frozen, and strict about what it does not know."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["Strict"]


class Strict(BaseModel):
    """Settings that cannot change once made and that refuse unknown keys, NaN and infinity.

    The docstring written under a field is that field's description, so help texts and the
    documentation of the YAML file come from the same words as the code.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
