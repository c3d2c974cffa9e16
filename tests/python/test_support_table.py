"""FA#828: the documented table of what is supported is the one that the checks make."""

from pathlib import Path

from fold_attention.support import support_table


def test_the_documented_table_is_generated_from_the_checks():
    page = (Path(__file__).parents[2] / "docs" / "support.md").read_text()
    assert page.endswith("\n\n" + support_table())
