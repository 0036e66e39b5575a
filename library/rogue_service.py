#!/usr/bin/python
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Fault injector: a service that holds the server's port and memory and comes back when it is killed."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

DOCUMENTATION = r"""
module: rogue_service
short_description: Install a service that nobody wants under supervisord
description:
  - Writes a real server program and a supervisord program for it with autorestart, ahead of all others.
  - The program keeps memory resident, tries for the port until it has it, and then answers every request with 200, as a
    healthy server of another kind would.
  - A fault injector for drills. It refuses unless O(drill_target=true) and the file O(marker) exists on the host.
author: [Relight authors (@relight)]
attributes:
  check_mode: {support: full, description: Says what it would break and breaks nothing.}
options:
  drill_target:
    description: Whether the inventory says that this host may be broken on purpose (relight_drill_target).
    type: bool
    required: true
  marker:
    description: A file whose presence on the host says the same.
    type: path
    required: true
  record:
    description: A JSON file on the host that gets an entry for what was broken, so that a proof can compare.
    type: path
  name:
    description: The program's name under supervisord.
    type: str
    required: true
  conf_dir:
    description: Supervisord's directory of program files.
    type: path
    required: true
  directory:
    description: Where the program's own file goes.
    type: path
    required: true
  port:
    description: The port that it wants.
    type: int
    required: true
  delay_seconds:
    description: How long it waits before it first tries for the port. Its memory it takes at once.
    type: float
    default: 0.0
  mib:
    description: How much memory it keeps.
    type: int
    default: 272
  secret:
    description:
      - A canary that its command line and its environment carry, under names that sound like a key and like ours.
      - No file that recovery leaves may hold it.
    type: str
"""

EXAMPLES = r"""
- name: Bring back a forgotten service
  rogue_service:
    drill_target: "{{ relight_drill_target }}"
    marker: /etc/relight-drill-target
    name: embedder
    conf_dir: /etc/supervisor/conf.d
    directory: /opt/embedder
    port: 30000
"""

RETURN = r"""
actions:
  description: What was broken, in sentences.
  returned: always
  type: list
  elements: str
conf:
  description: The program's file.
  returned: always
  type: str
"""

from ansible.module_utils.basic import AnsibleModule


def guard(module: AnsibleModule) -> None:
    """Refuse every host that is not meant to be broken."""
    if not module.params["drill_target"]:
        module.fail_json(msg="refused: the inventory does not say relight_drill_target: true for this host")
    if not os.path.isfile(module.params["marker"]):
        module.fail_json(msg=f"refused: this host does not carry the drill mark {module.params['marker']}")


def note(path: str | None, **entry: Any) -> None:
    """Add what was broken to the drill's record, a JSON object."""
    if path is None:
        return
    try:
        with open(path, encoding="utf-8") as handle:
            record = json.load(handle)
    except FileNotFoundError:
        record = {}
    record.update(entry)
    with open(f"{path}.tmp", "w", encoding="utf-8") as handle:
        json.dump(record, handle, indent=1, sort_keys=True)
    os.rename(f"{path}.tmp", path)


PROGRAM = '''\
"""A server that nobody wants any more: keeps memory, wants a port, answers everything with 200."""
import argparse
import http.server
import time

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--mib", type=int)
parser.add_argument("--delay", type=float)
parser.add_argument("--api-key")
wants = parser.parse_args()
held = bytearray(b"\\x01") * (wants.mib << 20)


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.do_GET()

    def log_message(self, *args):
        pass


time.sleep(wants.delay)
while True:
    try:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", wants.port), Answer)
        break
    except OSError:
        time.sleep(0.5)
print("listening", flush=True)
server.serve_forever()
'''

CONF = """\
[program:{name}]
command={python} {program} --port {port} --mib {mib} --delay {delay}{key}
autostart=true
autorestart=true
startsecs=0
priority=1
{environment}"""


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "drill_target": {"type": "bool", "required": True},
            "marker": {"type": "path", "required": True},
            "record": {"type": "path"},
            "name": {"type": "str", "required": True},
            "conf_dir": {"type": "path", "required": True},
            "directory": {"type": "path", "required": True},
            "port": {"type": "int", "required": True},
            "delay_seconds": {"type": "float", "default": 0.0},
            "mib": {"type": "int", "default": 272},
            "secret": {"type": "str", "no_log": True},
        },
        supports_check_mode=True,
    )
    guard(module)
    params = module.params
    name, secret = params["name"], params["secret"]
    conf = os.path.join(params["conf_dir"], f"{name}.conf")
    program = os.path.join(params["directory"], "serve.py")
    text = CONF.format(
        name=name,
        python=sys.executable,
        program=program,
        port=params["port"],
        mib=params["mib"],
        delay=params["delay_seconds"],
        key=f" --api-key {secret}" if secret else "",
        environment=f'environment=SERVICE_API_KEY="{secret}",RELIGHT_CANARY="{secret}"\n' if secret else "",
    )
    if not module.check_mode:
        try:
            os.makedirs(params["directory"], exist_ok=True)
            for path, content in ((program, PROGRAM), (conf, text)):
                with open(path, "w", encoding="utf-8") as handle:
                    handle.write(content)
        except OSError as error:
            module.fail_json(msg=f"cannot install {name}: {error}")
        note(params["record"], **{f"rogue_{name}": {"conf": conf, "port": params["port"], "mib": params["mib"]}})
    module.exit_json(changed=True, actions=[f"installed {name}, which wants port {params['port']}, ahead of all others"], conf=conf)


if __name__ == "__main__":
    main()
