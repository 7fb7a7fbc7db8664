//! Nodes, cores and binding by hwloc.

use std::sync::Arc;

use hwlocality::Topology;
use hwlocality::cpu::binding::CpuBindingFlags;
use hwlocality::cpu::cpuset::CpuSet;
use hwlocality::memory::binding::{MemoryBindingFlags, MemoryBindingPolicy};
use hwlocality::memory::nodeset::NodeSet;
use hwlocality::object::types::ObjectType;

use super::{Binder, RawNode};
use crate::error::{Error, Result};

/// This machine, or why hwloc cannot tell.
pub(super) fn here() -> Result<(Vec<RawNode>, Binder), String> {
    match Topology::new() {
        Ok(topology) if topology.is_this_system() => Ok((nodes(&topology), Binder::Hwloc(Arc::new(topology)))),
        Ok(_) => Err("hwloc was told of another machine (HWLOC_SYNTHETIC or HWLOC_XMLFILE)".into()),
        Err(e) => Err(format!("hwloc cannot read this machine ({e})")),
    }
}

pub(super) fn synthetic(description: &str) -> Result<Vec<RawNode>> {
    let invalid = |e: &dyn std::fmt::Display| Error::Invalid(format!("hwloc topology `{description}`: {e}"));
    let builder = Topology::builder().from_synthetic(description).map_err(|e| invalid(&e))?;
    Ok(nodes(&builder.build().map_err(|e| invalid(&e))?))
}

fn nodes(topology: &Topology) -> Vec<RawNode> {
    let numa: Vec<_> = topology.objects_with_type(ObjectType::NUMANode).collect();
    let number = |os_index: Option<usize>| os_index.unwrap_or(0);
    let cpus = |set: Option<&CpuSet>| -> Vec<usize> { set.into_iter().flatten().map(usize::from).collect() };
    let cores: Vec<Vec<usize>> = topology
        .objects_with_type(ObjectType::Core)
        .map(|core| cpus(core.cpuset().map(|c| c.clone_target()).as_ref()))
        .collect();
    let mut nodes: Vec<RawNode> = numa
        .iter()
        .map(|n| {
            let own = cpus(n.cpuset().map(|c| c.clone_target()).as_ref());
            let mut of_node: Vec<Vec<usize>> = cores
                .iter()
                .map(|core| core.iter().copied().filter(|c| own.contains(c)).collect::<Vec<_>>())
                .filter(|core| !core.is_empty())
                .collect();
            // CPUs that hwloc knows no cores of.
            of_node.extend(own.iter().filter(|c| !cores.iter().flatten().any(|o| o == *c)).map(|&c| vec![c]));
            let total = n.attributes().and_then(|a| match a {
                hwlocality::object::attributes::ObjectAttributes::NUMANode(a) => a.local_memory(),
                _ => None,
            });
            let total = total.map_or(0, |m| m.get());
            RawNode {
                index: number(n.os_index()),
                cores: of_node,
                total_bytes: total,
                free_bytes: total,
                distances: Vec::new(),
            }
        })
        .collect();
    nodes.sort_by_key(|n| n.index);
    nodes
}

pub(super) fn bind_thread(topology: &Topology, cpus: &[usize]) -> Result<(), String> {
    let set: CpuSet = cpus.iter().filter_map(|&c| hwlocality::bitmap::BitmapIndex::try_from(c).ok()).collect();
    topology
        .bind_cpu(&set, CpuBindingFlags::THREAD)
        .map_err(|e| format!("binding a thread to CPUs {}: {e}", super::cpu_ranges(cpus)))
}

pub(super) fn bind_memory(topology: &Topology, area: &mut [u8], node: usize) -> Result<(), String> {
    let set: NodeSet = hwlocality::bitmap::BitmapIndex::try_from(node).into_iter().collect();
    topology
        .bind_memory_area(area, &set, MemoryBindingPolicy::Bind, MemoryBindingFlags::THREAD)
        .map_err(|e| format!("binding memory to node {node}: {e}"))
}
