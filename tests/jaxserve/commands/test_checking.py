"""Roles and links as `serve --check` prints them."""

from jaxserve.commands.checking import describe_roles
from jaxserve.config.load import load_deployment
from tests import golden

FILES = {
    "two runtimes": (
        "roles: {attention: {dp: 3, runtime: a, hardware: h200}, ffn: {ep: 2, runtime: f}}\n"
        "links: {ffn: {transport: pull, addresses: ['10.0.0.7:5000'], dispatch: fp8}}\n"
    ),
    "one mesh": "roles: {colocated: {dp: 4, processes: 2}}\n",
    "a fleet": (
        "roles: {colocated: {dp: 2}, prefill: {workers: 3, long_workers: 1, long_tokens: 500, "
        "attention: {dp: 4, hardware: h20}}}\ndomains: 2\n"
        "links: {pages: {lease_seconds: 12.5, on_failure: fail, held: 7}}\n"
        "fleet: {prefill: ['p:1', 'p:2', 'p:3'], domains: ['d:1', 'd:2']}\n"
    ),
}


def test_roles_and_links(tmp_path):
    file, found = tmp_path / "deployment.yaml", {}
    for name, text in FILES.items():
        file.write_text("model: m\n" + text)
        found[name] = describe_roles(load_deployment(file)).splitlines()
    golden.check("commands/roles.json", found)
