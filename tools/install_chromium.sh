#!/usr/bin/env bash
# Chromium and its driver, which the tests of report.html open the page in; nothing is done where both are there.
#
#   tools/install_chromium.sh
set -euo pipefail
exec </dev/null

browser() { command -v chromium || command -v chromium-browser || command -v google-chrome; }
if ! browser >/dev/null || ! command -v chromedriver >/dev/null; then
  if [[ $(id -u) -ne 0 ]] || ! command -v apt-get >/dev/null; then
    echo "error: chromium or chromedriver is missing; install both (Debian: apt-get install chromium chromium-driver)" >&2
    exit 1
  fi
  echo "installing chromium and chromium-driver"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver fonts-dejavu-core
fi
"$(browser)" --version 2>/dev/null
chromedriver --version
