"""Builds the pipeline that the host drives, a call a stage and layer (`pipeline: layer`)."""

from jaxserve.config.deployment import Deployment
from jaxserve.link.dispatch.contract import Contract
from jaxserve.link.runtime_link import RuntimeLink
from jaxserve.roles.attention import AttentionWorker, Cell, Workers
from jaxserve.roles.attention_programs import build_attention
from jaxserve.roles.ffn import FFNWorker, build_ffn
from jaxserve.roles.layout import token_sizes
from jaxserve.roles.pipelines import OpenModel
from jaxserve.roles.schedule import Rotation
from jaxserve.roles.worker import Observer


def build_cell(model: OpenModel, deployment: Deployment, observer: Observer | None = None) -> Cell:
    """Builds one attention worker for each domain, an ffn worker, and the links between them. A
    process gets those for which it has devices."""
    config, names, meshes, templates, source = model
    contract, sizes = Contract.of(config, deployment), token_sizes(deployment)
    links = [
        RuntimeLink(deployment.link.transport, contract, mesh, meshes.ffn, sizes)
        for mesh in meshes.domains
    ]
    attention = []
    for mesh, link in zip(meshes.domains, links, strict=True):
        if mesh.local_devices:
            built = build_attention(templates, deployment, mesh, source, names)
            attention.append(AttentionWorker(*built, link.attention))
    workers = Workers(tuple(attention))
    if meshes.ffn.local_devices:
        worker = FFNWorker(*build_ffn(templates, deployment, meshes.ffn, source, names))
        for domain, link in enumerate(links):
            worker.attach(link.ffn, sizes, domain)
        workers = workers._replace(ffn=(worker,))
    domains = len(links)
    rotation = Rotation(config.layers, domains * deployment.lanes)
    predicts = bool(config.modules)
    return Cell(
        workers, rotation, deployment.lanes, observer, domains, predicts=predicts, links=links
    )
