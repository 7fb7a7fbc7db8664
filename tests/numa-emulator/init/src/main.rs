//! Run as `/init`: mounts what it reads, divides a layer of experts over all nodes, and checks that pages and threads are where they
//! should be and that the bits are those of one thread. Ends by switching the machine off.

use std::ffi::CString;
use std::process::ExitCode;

use kt::cpu::team::Team;
use kt::source::synthetic::SyntheticSource;
use kt::{Batch, Format, Group};

fn mount(kind: &str, at: &str) {
    std::fs::create_dir_all(at).expect("a place to mount at");
    let (kind, at) = (CString::new(kind).expect("no zero"), CString::new(at).expect("no zero"));
    // SAFETY: all strings end in zero and live through the call; such file systems take no data.
    let answer = unsafe { libc::mount(kind.as_ptr(), at.as_ptr(), kind.as_ptr(), 0, std::ptr::null()) };
    assert_eq!(answer, 0, "mounting {kind:?}: {}", std::io::Error::last_os_error());
}

fn check() -> Result<(), String> {
    let fail = |e: kt::Error| e.to_string();
    let source = SyntheticSource::builder()
        .hidden(1024)
        .intermediate(768)
        .experts(24)
        .top_k(4)
        .layers(1)
        .format(Format::Int4(Group::Of(32)))
        .build()
        .map_err(fail)?;
    let input: Vec<f32> = (0..5 * 1024).map(|i| (i as f32 * 0.37).sin()).collect();
    let ids: Vec<i32> = (0..20).map(|i| i * 7 % 24).collect();
    let mut outputs = Vec::new();
    for one in [true, false] {
        let builder = Team::builder();
        let team = if one { builder.threads(1) } else { builder }.build().map_err(fail)?;
        println!("team: {:?}", team.shares());
        team.notes().iter().for_each(|n| println!("note: {n}"));
        if !one && team.shares().len() < 2 {
            return Err(format!("one node only: {:?}", team.topology()));
        }
        if let Some(n) = team.notes().iter().find(|n| n.contains("is not bound to CPUs")) {
            return Err(n.clone());
        }
        let experts = kt::runtime().team(team).build().and_then(|r| r.load(&source)).map_err(fail)?;
        for r in experts.residence() {
            println!("node {}: {} bytes, pages {:?}, unbound {:?}", r.node, r.bytes, r.nodes, r.unbound);
            if r.unbound.is_some() || r.nodes != [(r.node, 1.0)] {
                return Err(format!("pages of node {} are elsewhere: {r:?}", r.node));
            }
        }
        let mut batch = Batch::new(5, input.clone(), ids.clone(), vec![0.25; 20]).map_err(fail)?;
        experts.layer(0).and_then(|l| l.forward(&mut batch)).map_err(fail)?;
        outputs.push(batch.into_output());
    }
    if outputs[0] == outputs[1] { Ok(()) } else { Err("other bits than on one node".into()) }
}

fn main() -> ExitCode {
    mount("proc", "/proc");
    mount("sysfs", "/sys");
    match std::panic::catch_unwind(check) {
        Ok(Ok(())) => println!("numa-emulator: passed"),
        Ok(Err(why)) => println!("numa-emulator: FAILED: {why}"),
        Err(_) => println!("numa-emulator: FAILED: panicked"),
    }
    // SAFETY: calls without preconditions; the second does not return when it succeeds.
    unsafe {
        libc::sync();
        libc::reboot(libc::RB_POWER_OFF);
    }
    ExitCode::FAILURE
}
