"""Python processes that start in milliseconds: forks of one that has imported torch and penstock.

A fresh interpreter needs about 2 s of processor time to import torch, as much again for the first
step of an optimizer, and 0.5 s for the packages of a build. Many tests need another process and not
these imports: they kill it, press Ctrl-C in it, or run several of them at a time. `Popen` and `run`
are those of `subprocess` for such tests:

    running = zygote.Popen(["-m", "penstock", "build", …], stdout=subprocess.PIPE, text=True)

The command is what follows `python`. The process has the arguments, directory, environment, streams
and exit code that it was given, and waits for its threads at the end. It differs from a fresh one
in what is imported, in the seed of hashes, and in settings that are read at start: variables of
OpenMP and of Python. Tests of imports, memory, limits or start-up use `subprocess`. Packages that
change what penstock does, such as transformers, are not imported before the fork.

Run as a program, this file is the process to fork from. It has no threads of Python, as a lock that
another thread holds would stay locked in a fork for ever.
"""

import atexit
import gc
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
import weakref
from contextlib import suppress
from importlib import import_module
from types import ModuleType

IMPORTED = (
    "torch",
    "torch.distributed",
    "torch._dynamo",  # the first step of an optimizer imports it
    "torch.distributed.fsdp",
    "matplotlib.figure",  # a run draws its curve with these two
    "matplotlib.backends.backend_svg",
    "awkward",
    "gigatoken",
    "tokenizers",
    "pyarrow.parquet",
    "pyarrow.compute",
    "penstock.cli.app",
    "penstock.cli.build",
    "penstock.loader.loader",
    "penstock.store.build",
    "penstock.streaming.stream",
    "penstock.train",
)
_STATUS_BYTES = 8
_MESSAGE_BYTES = 200_000  # at most; what Linux allows for one packet


class Popen:
    """A Python process, with the arguments, attributes and methods of `subprocess.Popen` in use."""

    def __init__(
        self,
        command,
        *,
        stdin=None,
        stdout=None,
        stderr=None,
        text=False,
        cwd=None,
        env=None,
        start_new_session=False,
    ):
        self.args = [str(each) for each in command]
        self.returncode = None
        self._waiting = threading.Lock()  # several threads may wait for the end
        request = {
            "arguments": self.args,
            "directory": os.fspath(cwd or os.getcwd()),  # noqa: PTH109 (text, for JSON)
            "environment": dict(os.environ if env is None else env),
            "new_session": start_new_session,
        }
        self._status, theirs = socket.socketpair()
        opened = [theirs.fileno()]
        self.stdin, reading = _stream(stdin, 0, text, opened)
        self.stdout, writing = _stream(stdout, 1, text, opened)
        self.stderr, errors = _stream(
            writing if stderr == subprocess.STDOUT else stderr, 2, text, opened
        )
        try:
            files = [reading, writing, errors, theirs.fileno()]
            socket.send_fds(_server(), [json.dumps(request).encode()], files)
        finally:
            theirs.detach()
            for file in opened:
                os.close(file)
        self.pid = int.from_bytes(self._status.recv(_STATUS_BYTES), "little")

    def poll(self):
        if self._waiting.acquire(blocking=False):
            try:
                if self.returncode is None:
                    self._status.setblocking(False)
                    with suppress(BlockingIOError):
                        self._receive()
            finally:
                self._waiting.release()
        return self.returncode

    def wait(self, timeout=None):
        with self._waiting:
            if self.returncode is None:
                self._status.settimeout(timeout)
                try:
                    self._receive()
                except TimeoutError:
                    raise subprocess.TimeoutExpired(self.args, timeout) from None
        return self.returncode

    def _receive(self):
        status = self._status.recv(_STATUS_BYTES)
        assert status, "the process that forks others has ended"
        self.returncode = os.waitstatus_to_exitcode(int.from_bytes(status, "little"))
        self._status.close()

    def communicate(self, input=None, timeout=None):
        """Write `input`, read all output, wait for the end; returns stdout and stderr."""
        deadline = None if timeout is None else time.monotonic() + timeout
        found = {}
        threads = [
            threading.Thread(
                target=lambda file=file: found.update({file: file.read()}), daemon=True
            )
            for file in (self.stdout, self.stderr)
            if file and not file.closed
        ]
        if self.stdin and not self.stdin.closed:
            threads.append(threading.Thread(target=self._write, args=(input,), daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout)
        self.wait(None if deadline is None else max(0.001, deadline - time.monotonic()))
        for file in (self.stdout, self.stderr):
            if file:
                file.close()
        return found.get(self.stdout), found.get(self.stderr)

    def _write(self, value):
        try:
            if value:
                self.stdin.write(value)
            self.stdin.close()
        except BrokenPipeError:  # it has ended, or does not read
            pass

    def send_signal(self, number):
        if self.poll() is None:
            with suppress(ProcessLookupError):  # if another thread has just seen the end
                os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for file in (self.stdout, self.stderr, self.stdin):
            if file:
                file.close()
        self.wait()


def run(command, *, input=None, capture_output=False, timeout=None, check=False, **options):
    """As `subprocess.run`."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(command, **options) as process:
        try:
            out, errors = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, errors)
    if check:
        done.check_returncode()
    return done


def _stream(wanted, number, text, opened):
    """Our end of a stream, or None, and the file of the process; adds to `opened` what to close."""
    if wanted is None:
        return None, number
    if wanted == subprocess.DEVNULL:
        opened.append(os.open(os.devnull, os.O_RDWR))
        return None, opened[-1]
    if wanted != subprocess.PIPE:
        return None, wanted if isinstance(wanted, int) else wanted.fileno()
    read, write = os.pipe()
    ours, theirs = (write, read) if number == 0 else (read, write)
    opened.append(theirs)
    return open(ours, ("w" if number == 0 else "r") + ("" if text else "b")), theirs  # noqa: PTH123


SHARED = "PENSTOCK_TEST_ZYGOTE"  # the variable that names the socket of the process to fork from
_servers = {}


def _server():
    """A socket of the process to fork from, which is started when it is first needed."""
    if os.getpid() not in _servers:
        if SHARED not in os.environ:
            start()
        else:
            ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
            ours.connect("\0" + os.environ[SHARED])
            _servers[os.getpid()] = ours
    return _servers[os.getpid()]


def start():
    """Start the process to fork from, for this process and all that inherit its environment."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
    name = f"penstock-zygote-{os.getpid()}-{os.urandom(8).hex()}"
    with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as others:
        others.bind("\0" + name)  # no file: it ends with the process
        others.listen()
        files = [theirs.fileno(), others.fileno()]
        process = subprocess.Popen(
            [sys.executable, __file__, *map(str, files)],
            pass_fds=files,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal is for the tests
        )
    os.environ[SHARED] = name
    _servers[os.getpid()] = ours
    atexit.register(_stop, ours, process)


def _stop(server, process):
    """End the server, and wait for it: its processor time is then part of this process's."""
    server.close()
    process.wait(60)


def serve(owner, others):
    """Fork a process for each request; returns in these processes alone, with the request.

    Requests come from the owner, with whom the server ends, and from all that connect to `others`.
    """
    clients = {owner}
    running = {}  # of each process, by its pidfd: its id, and the socket that awaits its status
    while True:
        ready, _, _ = select.select([others, *clients, *running], [], [])
        for ended in set(ready) & running.keys():
            pid, answers = running.pop(ended)
            status = os.waitpid(pid, 0)[1]
            _answer(answers, status)
            answers.close()
            os.close(ended)
        if others in ready:
            clients.add(others.accept()[0])
        for client in clients & set(ready):
            message, files, _, _ = socket.recv_fds(client, _MESSAGE_BYTES, 4)
            if not message and client is owner:  # the tests have ended
                sys.exit()
            if not message:
                clients.remove(client)
                client.close()
                continue
            *streams, answers = files
            pid = os.fork()
            if pid == 0:
                for each in (others, *clients):
                    each.close()
                for pidfd, (_, other) in running.items():
                    os.close(pidfd)
                    other.close()
                os.close(answers)
                for number, file in enumerate(streams):
                    os.dup2(file, number)
                    os.close(file)
                return json.loads(message)
            for file in streams:
                os.close(file)
            answers = socket.socket(fileno=answers)
            _answer(answers, pid)
            running[os.pidfd_open(pid)] = pid, answers


def _answer(answers, number):
    with suppress(OSError):  # nobody waits for it any more
        answers.send(number.to_bytes(_STATUS_BYTES, "little"), socket.MSG_NOSIGNAL)


def become(arguments, directory, environment, new_session):
    """Be the process of these arguments: run their program, as `python` does."""
    if new_session:
        os.setsid()
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    words, is_unbuffered = iter(arguments), bool(environment.get("PYTHONUNBUFFERED"))
    for word in words:
        if word == "-u":
            is_unbuffered = True
        elif word == "-W":
            warnings._processoptions([next(words)])
        else:
            break
    encoding = environment.get("PYTHONIOENCODING")
    sys.stdin = open(0, encoding=encoding, closefd=False)  # noqa: SIM115
    sys.stdout = _writer(1, encoding, "strict", is_unbuffered)
    sys.stderr = _writer(2, encoding, "backslashreplace", is_unbuffered)
    program = next(words) if word in ("-c", "-m") else word
    sys.argv = ["-c" if word == "-c" else program, *words]
    if word == "-c":
        sys.path[0] = ""
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), main.__dict__)
    elif word == "-m":
        sys.path[0] = directory
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(program)  # noqa: PTH120 (as the interpreter has it)
        runpy.run_path(program, run_name="__main__")


def _exit(program, **request):
    """Run and end as Python does, but leave memory to the kernel: that takes 0.2 s with torch."""
    try:
        program(**request)
        code = 0
    except SystemExit as error:
        if not isinstance(error.code, int | None):
            raise
        code = error.code or 0
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def _writer(number, encoding, errors, is_unbuffered):
    raw = open(number, "wb", closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(
        raw,
        encoding=encoding,
        errors=errors,
        line_buffering=number == 2 or raw.isatty(),
        write_through=is_unbuffered,
    )


if __name__ == "__main__":
    sockets = [socket.socket(fileno=int(each)) for each in sys.argv[1:]]
    for name in IMPORTED:
        import_module(name)
    # Most builds use this tokenizer, and compare it with the reference: 1 s to load both.
    gpt2 = import_module("penstock.tokenize.tokenizer").load_tokenizer("gpt2")
    gpt2.reference.load()
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the pages of all that is imported
    request = serve(*sockets)
    del sockets
    # The imports may have left finalizers: torch 2.6 has a temporary directory, which the first
    # fork that ends would delete for all.
    weakref.finalize._registry.clear()
    _exit(become, **request)
