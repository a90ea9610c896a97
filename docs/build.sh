#!/usr/bin/env bash
# Build the documentation site in site/. A broken link fails.
#
# The first build needs Python's package index and the npm registry, later ones no network. The site
# itself loads nothing from other hosts. To look at it: python -m http.server --directory site
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mermaid=11.17.2

# The tools are in an environment of their own: the docs extra without torch and the rest.
tools=$(python3 -c '
import tomllib
with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["project"]["optional-dependencies"]["docs"])')
if [ ! -e .venv-docs/tools ] || [ "$(cat .venv-docs/tools)" != "$tools" ]; then
  python3 -m venv .venv-docs
  # shellcheck disable=SC2086  # a list of words
  .venv-docs/bin/python -m pip install --quiet --disable-pip-version-check $tools
  echo "$tools" >.venv-docs/tools
fi

if [ ! -e docs/vendor/mermaid.min.js ]; then
  mkdir -p docs/vendor
  archive=$(cd docs/vendor && npm pack --silent "mermaid@$mermaid")
  tar -xzf "docs/vendor/$archive" -C docs/vendor --strip-components=2 package/dist/mermaid.min.js
  rm "docs/vendor/$archive"
fi

NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
echo "the site is in site/"
