#!/bin/sh
# Writes the software bill of materials (CycloneDX, JSON) of a Python environment, or of that in an image:
#   deploy/sbom.sh .venv/bin/python sbom.json
#   deploy/sbom.sh --image tdserve sbom.json
# The tool, cyclonedx-bom, comes by pip into a temporary folder, and so is no part of what it lists. PYTHON names the Python
# that runs pip; it should be as new as that of the image.
set -eu
tool=$(mktemp -d)
trap 'rm -rf "$tool"' EXIT
chmod 755 "$tool" # the image's user is another one
"${PYTHON:-python3}" -m pip install --quiet --disable-pip-version-check --target "$tool" 'cyclonedx-bom>=7,<8'
make="import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); runpy.run_module('cyclonedx_py', run_name='__main__', alter_sys=True)"
if [ "$1" = --image ]; then
    # Its own Python is asked, in a process that does not see the tool.
    docker run --rm --network none --volume "$tool:/tool:ro" --entrypoint python "$2" -c "$make" /tool \
        environment --output-reproducible --output-format JSON --output-file - /opt/tdserve/bin/python >"$3"
else
    "${PYTHON:-python3}" -c "$make" "$tool" environment --output-reproducible --output-format JSON --output-file - "$1" >"$2"
fi
