"""``gpuherd web``: the page of the machine, queues and runs, in a browser."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gpuherd.cli.common import add_json, print_json, print_note
from gpuherd.errors import ExitCode, UsageError, naming_extras
from gpuherd.options import Parser

WEB = """\
Shows the machine, your queues and your runs in a browser, until Ctrl-C. It listens on 127.0.0.1 and prints a link with
a token, which nobody else can guess. From your own computer: ssh -L 8642:127.0.0.1:8642 MACHINE, then open the link.

examples:
  gpuherd web                                  the machine and your own queues
  gpuherd web results/ answers/                also these run folders
  gpuherd web --port 0 --open                  any free port, and open the browser
  gpuherd web --host gpu-2 --host gpu-3        also these machines, side by side, asked over ssh
  gpuherd web --socket ~/web.sock --host-name lab.example.org --user-header X-Remote-User
                                               behind a reverse proxy that logs users in
  gpuherd web --bind 0.0.0.0 --tls-cert cert.pem --tls-key key.pem --password-file password.txt
"""
_EXTRAS = dict.fromkeys(("starlette", "uvicorn", "jinja2", "markupsafe", "h11"), "web")


def add_web(parser: Parser) -> None:
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="run folders to show")
    parser.add_argument(
        "--port", type=_port, metavar="N", help="port, 0 for any that is free (default: 8642, or any if that is taken)"
    )
    parser.add_argument(
        "--bind", metavar="ADDRESS", default="127.0.0.1", help="IP address to listen on (default: 127.0.0.1)"
    )
    parser.add_argument(
        "--host-name",
        action="append",
        default=[],
        metavar="NAME",
        help="a name by which browsers reach the page, where it is not localhost; may be given several times",
    )
    parser.add_argument("--socket", type=Path, metavar="PATH", help="listen on a Unix socket instead, for a proxy")
    parser.add_argument("--socket-group", metavar="GROUP", help="the group that may use the socket (default: only you)")
    parser.add_argument(
        "--user-header", metavar="NAME", help="with --socket: the header in which the proxy names who is logged in"
    )
    parser.add_argument(
        "--user-name", metavar="NAME", help="what that header must say for you (default: your login name)"
    )
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate (PEM), to serve by https")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="the certificate's key (PEM)")
    parser.add_argument(
        "--password-file", type=Path, metavar="FILE", help="log in by the password in this file, not by a token"
    )
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="show this machine too: gpuherd is run there over ssh, read-only; may be given several times",
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser of this machine")
    add_json(parser, "the link, once it can be opened,")


def run_web(args: argparse.Namespace) -> int:
    """Serves the page until Ctrl-C."""
    with naming_extras(_EXTRAS, "gpuherd web needs"):
        from gpuherd.web.serve import Listening, ServeOptions, WebServer

    for folder in args.folders:
        if not folder.is_dir():
            raise UsageError(f"{folder} is no folder; name the folders of runs")

    def show(listening: Listening) -> None:
        if args.json:
            print_json({"url": listening.url, "listens_on": listening.place})
        elif listening.url is None:
            print(f"listens on {listening.place}")
        else:
            print(listening.url)
        sys.stdout.flush()
        if args.port is None and args.socket is None and not listening.place.endswith(":8642"):
            print_note("port 8642 is taken, so another one is used")
        if args.open and listening.url is not None:
            import webbrowser

            webbrowser.open(listening.url)

    options = ServeOptions(
        port=args.port,
        bind=args.bind,
        host_names=tuple(args.host_name),
        socket=args.socket,
        socket_group=args.socket_group,
        user_header=args.user_header,
        user_name=args.user_name,
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
        password_file=args.password_file,
        runs=tuple(folder.absolute() for folder in args.folders),
        hosts=tuple(args.host),
    )
    try:
        WebServer(options).run(show)
    except KeyboardInterrupt:
        return ExitCode.OK
    return ExitCode.OK


def _port(word: str) -> int:
    if word.isascii() and word.isdecimal() and int(word[:6]) <= 65_535:
        return int(word)
    raise argparse.ArgumentTypeError(f"{word!r} is no port: a number from 0 to 65535")
