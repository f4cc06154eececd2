#!/bin/sh
# Copy the viewer's JavaScript and CSS libraries, with their licences, from their npm packages at pinned versions. The
# files are committed, so that the viewer needs neither npm nor a network; `npm pack` runs nothing of a package.
set -eu
vendor=$(cd "$(dirname "$0")/../viewer/static/vendor" && pwd)

copy() { # PACKAGE@VERSION, then FILE:NAME of each file
    directory=$(mktemp -d)
    tar -xzf "$directory/$(cd "$directory" && npm pack --silent "$1" | tail -n 1)" -C "$directory"
    shift
    for pair in "$@"; do
        cp "$directory/package/${pair%:*}" "$vendor/${pair#*:}"
    done
    rm -r "$directory"
}

copy htmx.org@2.0.8 dist/htmx.min.js:htmx.min.js LICENSE:htmx.LICENSE
copy htmx-ext-sse@2.2.4 dist/sse.min.js:sse.min.js LICENSE:sse.LICENSE
copy idiomorph@0.7.4 dist/idiomorph-ext.min.js:idiomorph-ext.min.js LICENSE:idiomorph.LICENSE
copy uplot@1.6.32 dist/uPlot.iife.min.js:uPlot.iife.min.js dist/uPlot.min.css:uPlot.min.css LICENSE:uPlot.LICENSE
cd "$vendor" && sha256sum ./*.js ./*.css ./*.LICENSE | sed 's# \./# #' > SHA256SUMS
