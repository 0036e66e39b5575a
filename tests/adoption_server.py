# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Stands for `python -m sglang.launch_server` where only its process matters: answers /health on --port with --status."""

from __future__ import annotations

import http.server
import sys


def option(name: str, default: str) -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(int(option("--status", "200")))
        self.end_headers()

    def log_message(self, *_words: object) -> None:
        pass


if __name__ == "__main__":
    print("server_args=ServerArgs(model_path='/models/m', tp_size=8, api_key='Zq7canary9Xw', context_length=65536)", flush=True)
    http.server.HTTPServer(("127.0.0.1", int(option("--port", "0"))), Answer).serve_forever()
