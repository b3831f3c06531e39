"""Roles and links as `serve --check` prints them."""

import yaml

from jaxserve.commands.checking import describe_roles
from jaxserve.config.load import load_deployment
from tests import golden

FILES = yaml.safe_load(golden.text("commands/checked.yaml"))


def test_roles_and_links(tmp_path):
    file, found = tmp_path / "deployment.yaml", {}
    for name, text in FILES.items():
        file.write_text("model: m\n" + text)
        found[name] = describe_roles(load_deployment(file)).splitlines()
    golden.check("commands/roles.json", found)
