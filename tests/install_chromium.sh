#!/bin/sh
# Make sure that there is a Chromium for the browser tests. Installs the distribution's package where that
# is possible without asking anybody; otherwise says what to do. The tests themselves decide what a missing
# browser means (a skip, or a failure where CI=true), so this script never fails.
set -u

for name in ${KEEPWARM_CHROMIUM:+"$KEEPWARM_CHROMIUM"} chromium chromium-browser google-chrome; do
    command -v "$name" >/dev/null 2>&1 && exit 0
done

if [ "$(id -u)" = 0 ]; then
    as_root=""
elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
    as_root="sudo -n"
else
    as_root="nobody"
fi

if [ "$as_root" != nobody ] && command -v apt-get >/dev/null 2>&1; then
    echo "Installing Chromium for the browser tests ..."
    DEBIAN_FRONTEND=noninteractive
    export DEBIAN_FRONTEND
    $as_root apt-get update -q >/dev/null &&
        $as_root apt-get install -y -q --no-install-recommends chromium fonts-noto-color-emoji >/dev/null &&
        exit 0
    echo "Chromium could not be installed; install it yourself or set KEEPWARM_CHROMIUM to the path of one." >&2
    exit 0
fi
echo "There is no Chromium: install it, or set KEEPWARM_CHROMIUM to its path, to run the browser tests." >&2
