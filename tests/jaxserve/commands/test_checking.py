"""What `serve --check` says of roles and links."""

from jaxserve.commands.checking import describe_roles
from jaxserve.config.load import load_deployment


class TestRolesTable:
    def test_of_two_runtimes(self, tmp_path):
        file = tmp_path / "deployment.yaml"
        file.write_text(
            "model: m\nroles: {attention: {dp: 3, runtime: a, hardware: h200}, "
            "ffn: {ep: 2, runtime: f}}\n"
            "links: {ffn: {transport: pull, addresses: ['10.0.0.7:5000'], dispatch: fp8}}\n"
        )
        assert describe_roles(load_deployment(file)).splitlines() == [
            "role       runtime  devices          processes  hardware",
            "attention  a        dp 3 x tp 1 = 3  1          h200",
            "ffn        f        ep 2 x tp 1 = 2  1          -",
            "link: 3 pieces a message in 2 copies, pull, rows in fp8, answers in bfloat16, "
            "ffn workers at 10.0.0.7:5000",
        ]

    def test_of_one_mesh(self, tmp_path):
        file = tmp_path / "deployment.yaml"
        file.write_text("model: m\nroles: {colocated: {dp: 4, processes: 2}}\n")
        assert describe_roles(load_deployment(file)).splitlines() == [
            "role       runtime  devices          processes  hardware",
            "colocated  main     dp 4 x tp 1 = 4  2          -",
        ]

    def test_of_a_fleet(self, tmp_path):
        file = tmp_path / "deployment.yaml"
        file.write_text(
            "model: m\nroles: {colocated: {dp: 2}, prefill: {workers: 3, long_workers: 1, "
            "long_tokens: 500, attention: {dp: 4, hardware: h20}}}\ndomains: 2\n"
            "links: {pages: {lease_seconds: 12.5, on_failure: fail, held: 7}}\n"
            "fleet: {prefill: ['p:1', 'p:2', 'p:3'], domains: ['d:1', 'd:2']}\n"
        )
        assert describe_roles(load_deployment(file)).splitlines() == [
            "role                   runtime  devices          processes   hardware",
            "colocated x 2          main     dp 2 x tp 1 = 2  as started  -",
            "prefill colocated x 3  main     dp 4 x tp 1 = 4  as started  h20",
            "pages: up to 7 requests held by a prefill worker, leases of 12.5 s, a hand-off that "
            "does not succeed is failed",
            "long prompts: of 500 tokens and more, on 1 of 3 prefill workers",
            "router: static registry; prefill workers at p:1, p:2, p:3; domains at d:1, d:2",
        ]
