"""The recipes that come with penstock: those of the documentation."""

from pathlib import Path


def bundled_recipes() -> dict[str, Path]:
    """The files of these recipes, by name."""
    folder = Path(__file__).parents[1] / "recipes"
    return {each.stem: each for each in sorted(folder.glob("*.toml"))}
