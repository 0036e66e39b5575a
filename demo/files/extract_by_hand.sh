#!/bin/sh
# Runs the extraction in the foreground, as the team did before it had units: extract_by_hand.sh HOST_ENVIRONMENT STATE_DIR
# The demo's disaster wipes it, and relight_restore_files brings it back.
set -eu
exec "$1/bin/python" -m relight extract --config "$2/extract.json"
