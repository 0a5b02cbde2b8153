"""The sections of a page, and their HTML.

Each section has a function that measures, and a template that shows the result. Templates escape
every value, so text from data stays text. The only HTML that is not escaped is SVG that
`penstock.charts` has made, whose text is escaped there.
"""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.report.corpus_section import corpus
from penstock.report.page import environment
from penstock.report.subject import Subject
from penstock.report.viewer import chosen_documents, shown_documents, shown_steps

Context = dict[str, object]


@dataclass(frozen=True, slots=True)
class Section:
    """A section of a page."""

    name: str
    title: str
    measure: Callable[[Subject], Context]
    template: str


def render(section: Section, subject: Subject) -> str:
    """Return the HTML of a section, without its title."""
    found = environment().get_template(section.template)
    return found.render(**section.measure(subject))


def sections_of(subject: Subject) -> list[Section]:
    """Return the sections of a page."""
    documents = [Section("documents", "Documents", _documents, "viewer.html")]
    if not chosen_documents(subject):
        documents = []
    about = [Section("corpus", "Corpus", corpus, "corpus.html"), *documents]
    if subject.run is None:
        return about
    # Imported here, because it imports torch, and a store does not need it.
    from penstock.report import run_sections

    logged = (subject.run.job.output / "metrics.jsonl").exists() and subject.run.record is not None
    curve = Section("loss", "Loss", run_sections.loss, "charts.html")
    return [
        Section("run", "Run", run_sections.overview, "overview.html"),
        *([curve] if logged else []),
        Section("steps", "Steps", _steps, "viewer.html"),
        Section("mixture", "Mixture", run_sections.mixture, "charts.html"),
        Section("packing", "Packing", run_sections.packing, "packing.html"),
        Section("shuffle", "Shuffle", run_sections.shuffle, "shuffle.html"),
        *about,
    ]


def _steps(subject: Subject) -> Context:
    return {"items": shown_steps(subject)}


def _documents(subject: Subject) -> Context:
    return {"items": shown_documents(subject)}
