//! Threads are no more than the process may use: CPU quotas of control groups, and affinity, for real.
#![cfg(target_os = "linux")]

mod common;

use std::path::Path;
use std::process::Command;

use common::cgroup::Group;
use kt::cpu::topology::Topology;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/model");

fn json(command: &mut Command) -> serde_json::Value {
    let out = command.output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice(&out.stdout).unwrap()
}

fn plan() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kt"));
    command.args(["plan", "--json", "--model", MODEL]);
    command
}

fn notes(plan: &serde_json::Value) -> String {
    plan["notes"].as_array().unwrap().iter().map(|n| n.as_str().unwrap()).collect::<Vec<_>>().join("; ")
}

#[test]
fn a_quota_of_one_cpu_is_one_thread() {
    let group = match Group::new("cpu", "quota") {
        Ok(group) => group,
        Err(why) => {
            eprintln!("SKIPPED: a CPU quota could not be set (needs root and a writable control group): {why}");
            return;
        }
    };
    // A CPU and a half pays for one thread.
    if group.is_v2() {
        group.set(["cpu.max"; 2], "150000 100000");
    } else {
        group.set(["cpu.cfs_period_us"; 2], "100000");
        group.set(["cpu.cfs_quota_us"; 2], "150000");
    }
    let limited = json(&mut group.inside(&plan()));
    assert_eq!(limited["threads"], 1);
    if Topology::detect().allowed().len() > 1 {
        assert!(notes(&limited).contains("a quota allows 1.50 CPUs' worth of time"), "{}", notes(&limited));
    }
    let mut asked = plan();
    asked.args(["--threads", "64"]);
    let limited = json(&mut group.inside(&asked));
    assert_eq!(limited["threads"], 1);
    assert!(notes(&limited).contains("64 threads were asked for"), "{}", notes(&limited));
}

#[test]
fn a_process_on_one_cpu_has_one_thread_and_says_so() {
    let here = Topology::detect();
    if here.allowed().len() < 2 {
        eprintln!("SKIPPED: this process has one CPU only");
        return;
    }
    if !Path::new("/usr/bin/taskset").exists() {
        eprintln!("SKIPPED: no taskset here");
        return;
    }
    let mut kept = Command::new("taskset");
    kept.args(["-c", &here.allowed()[1].to_string()]).arg(plan().get_program()).args(plan().get_args());
    let kept = json(&mut kept);
    assert_eq!(kept["threads"], 1);
    assert!(notes(&kept).contains("are not used: this thread is kept to"), "{}", notes(&kept));
}
