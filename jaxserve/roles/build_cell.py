"""Makes the cell of a process of a runtime with both roles: workers, and the links between them."""

from jaxserve.checkpoint.source import CheckpointNames
from jaxserve.config.deployment import Deployment
from jaxserve.link.dispatch.contract import Contract
from jaxserve.link.runtime_link import RuntimeLink
from jaxserve.mesh import Submeshes, has_local_devices
from jaxserve.model.blocks import ModelTemplates
from jaxserve.roles.attention import AttentionWorker, build_attention
from jaxserve.roles.capacity import token_sizes
from jaxserve.roles.cell import Cell, Workers
from jaxserve.roles.ffn import FFNWorker, build_ffn
from jaxserve.roles.schedule import Rotation
from jaxserve.roles.weights import LeafSource
from jaxserve.roles.worker import Observer


def build_cell(
    templates: ModelTemplates,
    deployment: Deployment,
    meshes: Submeshes,
    source: LeafSource,
    names: CheckpointNames,
    observer: Observer | None = None,
) -> Cell:
    """The workers of the roles that this process has devices of, and the links between them: an
    attention worker a domain, and one ffn worker."""
    contract, sizes = Contract.of(templates.config, deployment), token_sizes(deployment)
    links = [
        RuntimeLink(deployment.link.transport, contract, mesh, meshes.ffn, sizes)
        for mesh in meshes.domains
    ]
    attention = []
    for mesh, link in zip(meshes.domains, links, strict=True):
        if has_local_devices(mesh):
            built = build_attention(templates, deployment, mesh, source, names)
            attention.append(AttentionWorker(*built, link.attention))
    workers = Workers(tuple(attention))
    if has_local_devices(meshes.ffn):
        worker = FFNWorker(*build_ffn(templates, deployment, meshes.ffn, source, names))
        for domain, link in enumerate(links):
            worker.attach(link.ffn, sizes, domain)
        workers = workers._replace(ffn=(worker,))
    domains = len(links)
    rotation = Rotation(templates.config.layers, domains * deployment.lanes)
    predicts = bool(templates.config.modules)
    return Cell(
        workers, rotation, deployment.lanes, observer, domains, predicts=predicts, links=links
    )
