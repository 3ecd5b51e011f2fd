#!/usr/bin/env bash
# A browser for the viewer's tests: one that is there, or the package manager's if we may use it.
# Without one these tests are skipped with a message; nothing else needs it.
set -u
for name in chromium chromium-browser google-chrome google-chrome-stable; do
	if command -v "$name" >/dev/null; then exit 0; fi
done
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
	echo "setup: no Chromium here, so the viewer's tests are left out; install chromium to run them" >&2
	exit 0
fi
echo "setup: Chromium"
install() { apt-get install -y --no-install-recommends chromium >/dev/null 2>&1; }
install || { apt-get update >/dev/null 2>&1 && install; } ||
	echo "setup: Chromium could not be installed, so the viewer's tests are left out" >&2
