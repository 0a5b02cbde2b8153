"""The page on this machine: a small server for one reader.

    GET /                       the page, without its sections
    GET /sections               their names
    GET /sections/NAME          the HTML of one
    GET /steps/STEP/ROW         a row of a step
    GET /documents/STORE/N/0    a document, which is one row

The server listens before the data is opened, so that it answers at once. It reads no file that a
request names. It listens on 127.0.0.1 only, and refuses requests whose Host header is another
name: otherwise a web page that lets its own name point to 127.0.0.1 could read the data.

Modules that need NumPy are imported by the functions that answer, because the server must start
in less time than that takes.
"""

import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import TYPE_CHECKING, Self
from urllib.parse import unquote, urlsplit

from penstock.cli.terminal import visible
from penstock.errors import PenstockError
from penstock.report.page import page_html, policy

if TYPE_CHECKING:
    from penstock.report.sections import Section
    from penstock.report.subject import Subject

_HOST = "127.0.0.1"
_IDLE_SECONDS = 60.0
Context = dict[str, object]


class ReportServer:
    """Serves the page about a subject, in threads of this process.

        server = ReportServer("stores/web", lambda: open_subject("stores/web"))
        with server:
            print(server.url)
            server.wait()

    Args:
        name: The title of the page.
        open: Opens the subject. It is called once, by `wait`.
        port: The port; 0 takes a free one.
    """

    def __init__(self, name: str, open: "Callable[[], Subject]", *, port: int = 0) -> None:
        self._open = open
        self._pages = _Pages(name)
        self._server = _Server((_HOST, port), self._pages)
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="report-server", daemon=True
        )

    def __repr__(self) -> str:
        return f"ReportServer({self._pages.name!r}: {self.url})"

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{_HOST}:{self._server.server_address[1]}/"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Requests that wait for the subject must end: otherwise the process could not.
        self._pages.subject.cancel()
        self._server.shutdown()
        self._server.server_close()

    def open(self) -> None:
        """Open the subject; requests that came earlier have waited for it."""
        self._pages.subject.set_result(self._open())

    def wait(self) -> None:
        """Open the subject, and serve until Ctrl-C."""
        self.open()
        # With a timeout, because a wait without one cannot be interrupted on Windows.
        while self._thread.is_alive():
            self._thread.join(1.0)


class _Server(ThreadingHTTPServer):
    daemon_threads = True  # a request that measures a large store must not keep the process

    def __init__(self, address: tuple[str, int], pages: "_Pages") -> None:
        self.pages = pages
        super().__init__(address, _Handler)
        port = self.server_address[1]
        self.hosts = {f"{name}:{port}" for name in (_HOST, "localhost")}

    def server_bind(self) -> None:
        """Bind the socket; without the lookup of the host's name, which may take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = _HOST, self.server_address[1]

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing if the reader closed the connection, as a reload does."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Pages:
    """The answers to requests."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.subject: Future[Subject] = Future()
        self._lock = threading.Lock()
        self._done: dict[str, str] = {}

    def json_at(self, words: list[str]) -> object:
        """Return the answer to a path as JSON.

        Raises:
            LookupError: there is no such page, step or document.
        """
        subject = self.subject.result()
        from penstock.report.sections import sections_of
        from penstock.report.viewer import document_row, step_row

        match words:
            case ["sections"]:
                return [{"name": each.name, "title": each.title} for each in sections_of(subject)]
            case ["sections", name]:
                found = [each for each in sections_of(subject) if each.name == name]
                return {"html": self._html(found[0], subject)}
            case ["steps", step, row] if subject.run is not None:
                return step_row(subject, _number(step), _number(row))
            case ["documents", corpus, number, "0"]:
                return document_row(subject, _number(corpus), _number(number))
        raise LookupError("there is no such page")

    def _html(self, section: "Section", subject: "Subject") -> str:
        from penstock.report.sections import render

        # Sections are measured one after the other: each of them uses all cores, or a lock.
        with self._lock:
            if section.name not in self._done or section.is_live:
                self._done[section.name] = render(_live(section, subject), subject)
            return self._done[section.name]


def _live(section: "Section", subject: "Subject") -> "Section":
    """Return a section whose viewer fetches its rows."""
    from penstock.report.sections import Section

    measures: dict[str, Callable[[Subject], Context]] = {
        "steps": _steps,
        "documents": _documents,
    }
    measure = measures.get(section.name, section.measure)
    return Section(section.name, section.title, measure, section.template, section.is_live)


def _steps(subject: "Subject") -> Context:
    from penstock.report.viewer import chosen_steps

    steps = subject.steps
    items = [{"label": f"step {each:,}", "url": f"/steps/{each}"} for each in chosen_steps(subject)]
    live: Context = {"first": steps.first, "last": steps.last, "corpora": []}
    return {"kind": "steps", "noun": "step", "items": items, "live": live}


def _documents(subject: "Subject") -> Context:
    from penstock.report.viewer import chosen_documents

    names = [visible(each, lines=False) for each in subject.corpora]
    items = [
        {"label": f"{names[corpus]}: document {each:,}", "url": f"/documents/{corpus}/{each}"}
        for corpus, each in chosen_documents(subject)
    ]
    live: Context = {"first": 0, "last": None, "corpora": names}
    return {"kind": "documents", "noun": "document", "items": items, "live": live}


def _number(word: str) -> int:
    """Return a number of a path, in decimal digits only."""
    if not (word.isascii() and word.isdigit() and len(word) < 20):
        raise LookupError(f"{word[:20]!r} is not a number")
    return int(word)


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: _Server
    server_version = "penstock"
    sys_version = ""
    timeout = _IDLE_SECONDS

    def do_GET(self) -> None:
        # A browser sends the name that its user, or a foreign page, has asked for.
        if self.headers.get("Host", "").lower() not in self.server.hosts:
            self._send(HTTPStatus.FORBIDDEN, {"error": "this server answers to 127.0.0.1 only"})
            return
        pages = self.server.pages
        path = urlsplit(self.path).path
        if path == "/":
            page = page_html(pages.name, [], live=True)
            self._answer(HTTPStatus.OK, "text/html", page.encode())
            return
        try:
            found = pages.json_at([unquote(word) for word in path.split("/")[1:]])
        except (LookupError, PenstockError) as error:
            text = visible(str(error.args[0] if error.args else error), lines=False)
            self._send(HTTPStatus.NOT_FOUND, {"error": text})
        except CancelledError:  # the subject could not be opened, or Ctrl-C came first
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, {"error": "the server has ended"})
        except OSError as error:
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": visible(str(error))})
        else:
            self._send(HTTPStatus.OK, found)

    def _send(self, status: HTTPStatus, value: object) -> None:
        self._answer(status, "application/json", json.dumps(value).encode())

    def _answer(self, status: HTTPStatus, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", f"{len(data)}")
        self.send_header("Content-Security-Policy", f"{policy(live=True)}; frame-ancestors 'none'")
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a request is a click of the user."""


_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",  # other pages may not embed an answer
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
