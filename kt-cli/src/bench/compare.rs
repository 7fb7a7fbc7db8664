//! `kt bench --compare`: an earlier run, read from its JSON lines and held against this one.
//!
//! What is compared are fractions of the limits that were measured beside each case, never times: the same machine is half as fast
//! an hour later, and its kernels with it.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, bail};
use serde_json::{Value, json};

use super::record::{Line, Machine, VERSION};

/// More than any run prints: a file above this is not one.
const MOST_BYTES: u64 = 64 << 20;

/// A case of the earlier run.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    backend: String,
    tier: String,
    threads: u64,
    /// Hidden, intermediate, experts, top-k.
    sizes: [u64; 4],
    limit: String,
    fraction: f64,
    quartiles: [f64; 2],
}

/// Format, shape, tokens.
type Key = (String, String, u64);

/// An earlier run.
#[derive(Debug, Clone, PartialEq)]
pub struct Earlier {
    machines: Vec<Machine>,
    cases: BTreeMap<Key, Case>,
}

/// How a case compares.
#[derive(Debug, Clone, PartialEq)]
pub struct Comparison {
    /// The earlier fraction of the limit.
    pub earlier: f64,
    /// This fraction over the earlier one.
    pub ratio: f64,
    /// Whether the middle halves of both measurements overlap.
    pub within_spread: bool,
    /// What was not the same: backend, tier, threads, sizes, the limit.
    pub differs: Vec<String>,
}

impl Comparison {
    pub fn to_json(&self) -> Value {
        json!({ "fraction_of_limit": self.earlier, "ratio": self.ratio, "within_spread": self.within_spread, "differs": self.differs })
    }

    pub fn header() -> String {
        format!("{:>9} {:>7}", "earlier", "ratio")
    }

    /// The columns of a case; `None` for one that the earlier run does not have.
    pub fn columns(comparison: Option<&Comparison>) -> String {
        match comparison {
            None => format!("{:>9} {:>7}", "new", ""),
            Some(c) => {
                let same = if c.within_spread { "=" } else { " " };
                let differs = if c.differs.is_empty() { String::new() } else { format!("  {}", c.differs.join(", ")) };
                format!("{:>7.1} % {:>6.3}{same}{differs}", c.earlier * 100.0, c.ratio)
            }
        }
    }
}

impl Earlier {
    /// Reads a file.
    ///
    /// # Errors
    /// What [`Earlier::parse`] says, with the file's name.
    pub fn read(path: &Path) -> anyhow::Result<Earlier> {
        let name = path.display();
        let mut text = String::new();
        let file = std::fs::File::open(path).with_context(|| format!("--compare: cannot open {name}"))?;
        file.take(MOST_BYTES + 1)
            .read_to_string(&mut text)
            .with_context(|| format!("--compare: cannot read {name}"))?;
        if text.len() as u64 > MOST_BYTES {
            bail!("--compare: {name} is over 64 MiB: not the output of `kt bench --json`");
        }
        Earlier::parse(&text).with_context(|| format!("--compare: {name}"))
    }

    /// Reads the output of `kt bench --json`. Of a case that is there more than once the last counts.
    ///
    /// # Errors
    /// The line that is not such output, what is wrong with it, and what to do.
    pub fn parse(text: &str) -> anyhow::Result<Earlier> {
        let mut earlier = Earlier { machines: Vec::new(), cases: BTreeMap::new() };
        let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        for (i, line) in lines {
            earlier.take(line).with_context(|| format!("line {}", i + 1))?;
        }
        if earlier.cases.is_empty() {
            bail!("holds no cases; make it with `kt bench --json > FILE`");
        }
        Ok(earlier)
    }

    fn take(&mut self, line: &str) -> anyhow::Result<()> {
        let value: Value = serde_json::from_str(line).context(
            "is not JSON; give the output of `kt bench --json`, and if it was cut off, remove its last line",
        )?;
        if value.get("kt_bench").is_some() {
            match whole(&value, "kt_bench")? {
                VERSION => self.machines.push(machine(&value)?),
                other => bail!(
                    "was written in version {other} of these lines, this `kt` reads version {VERSION}: measure both with one `kt`"
                ),
            }
        } else if self.machines.is_empty() {
            bail!(
                "comes before any machine's line, the one with `kt_bench`; give the whole output of `kt bench --json`"
            );
        } else if value.get("scheduling").is_none() {
            let (key, case) = case(&value)?;
            self.cases.insert(key, case);
        }
        Ok(())
    }

    /// What to say about both runs before anything is measured.
    pub fn preface(&self, now: &Machine) -> Vec<String> {
        let last = self.machines.last();
        let date = last.map_or("", |m| &m.date);
        let mut lines = vec![format!(
            "compared with a run of {date}: `ratio` is this fraction of the limit over the earlier one, `=` where both are within \
             their spread. Machines drift: times are not compared"
        )];
        for m in &self.machines {
            let pairs = [
                ("CPU", &m.cpu, &now.cpu),
                ("CPUs", &m.cpus.to_string(), &now.cpus.to_string()),
                ("tier", &m.tier, &now.tier),
                ("threads", &m.threads.to_string(), &now.threads.to_string()),
                ("kt", &m.version, &now.version),
            ];
            for (what, then, now) in pairs {
                let line = format!("DIFFERENT {what}: {then} earlier, {now} now");
                if then != now && !lines.contains(&line) {
                    lines.push(line);
                }
            }
        }
        lines
    }

    /// Holds a case against the earlier one, where there is one.
    pub fn compare(&self, line: &Line) -> Option<Comparison> {
        let case = self.cases.get(&key(line))?;
        let of_limit = line.speed.of_limit;
        let sizes = line.shape.sizes().map(|n| n as u64);
        let pairs = [
            (case.sizes != sizes, format!("sizes {:?} earlier", case.sizes)),
            (case.backend != line.backend, format!("{} earlier", case.backend)),
            (case.tier != line.tier, format!("{} earlier", case.tier)),
            (case.threads != line.threads as u64, format!("{} threads earlier", case.threads)),
            (case.limit != line.limit(), format!("{} earlier", case.limit)),
        ];
        Some(Comparison {
            earlier: case.fraction,
            ratio: of_limit.median / case.fraction,
            within_spread: of_limit.low <= case.quartiles[1] && case.quartiles[0] <= of_limit.high,
            differs: pairs.into_iter().filter(|p| p.0).map(|p| p.1).collect(),
        })
    }

    /// The earlier run's cases that are not among these.
    pub fn missing(&self, lines: &[Line]) -> Vec<String> {
        let done: Vec<Key> = lines.iter().map(key).collect();
        let missing = self.cases.iter().filter(|(key, _)| !done.contains(key));
        missing
            .map(|((format, shape, tokens), case)| {
                format!("{format}, {shape}, {tokens} tokens: {:.1} % of {}", case.fraction * 100.0, case.limit)
            })
            .collect()
    }
}

fn key(line: &Line) -> Key {
    (line.format.clone(), line.shape.name.clone(), line.tokens as u64)
}

fn machine(value: &Value) -> anyhow::Result<Machine> {
    let text = |name| Ok::<_, anyhow::Error>(self::text(value, name)?.to_owned());
    Ok(Machine {
        date: text("date")?,
        version: text("version")?,
        cpu: text("cpu")?,
        cpus: whole(value, "cpus")? as usize,
        cores: whole(value, "cores")? as usize,
        tier: text("tier")?,
        threads: whole(value, "threads")? as usize,
    })
}

fn case(value: &Value) -> anyhow::Result<(Key, Case)> {
    let text = |name| Ok::<_, anyhow::Error>(self::text(value, name)?.to_owned());
    let whole = |name| whole(value, name);
    let quartiles = value.get("fraction_quartiles").and_then(Value::as_array).map(Vec::as_slice);
    let Some([Some(low), Some(high)]) = quartiles.and_then(|q| Some([q.first()?.as_f64(), q.get(1)?.as_f64()])) else {
        bail!("`fraction_quartiles` is missing or not two numbers{MEND}");
    };
    let fraction = value.get("fraction_of_limit").and_then(Value::as_f64).filter(|f| *f > 0.0);
    let Some(fraction) = fraction else { bail!("`fraction_of_limit` is missing or not a number above 0{MEND}") };
    let case = Case {
        backend: text("backend")?,
        tier: text("tier")?,
        threads: whole("threads")?,
        sizes: [whole("hidden")?, whole("intermediate")?, whole("experts")?, whole("top_k")?],
        limit: text("limit")?,
        fraction,
        quartiles: [low, high],
    };
    Ok(((text("format")?, text("shape")?, whole("tokens")?), case))
}

const MEND: &str = "; give the output of `kt bench --json` as it was printed";

fn text<'a>(value: &'a Value, name: &str) -> anyhow::Result<&'a str> {
    value.get(name).and_then(Value::as_str).with_context(|| format!("`{name}` is missing or not a text{MEND}"))
}

fn whole(value: &Value, name: &str) -> anyhow::Result<u64> {
    value.get(name).and_then(Value::as_u64).with_context(|| format!("`{name}` is missing or not a whole number{MEND}"))
}

#[cfg(test)]
mod tests {
    use super::super::record::tests::{line, machine};
    use super::*;
    use crate::limits::Meter;
    use kt::cpu::tier::Tier;

    fn header() -> String {
        let limits = Meter::new(1, &[], 1 << 20, Tier::Portable).unwrap().measure();
        machine().to_json(&limits).to_string()
    }

    fn run(lines: &[Line]) -> String {
        let lines: Vec<String> = lines.iter().map(|l| l.to_json().to_string()).collect();
        format!("{}\n{}\n", header(), lines.join("\n"))
    }

    fn error(text: &str) -> String {
        format!("{:#}", Earlier::parse(text).expect_err("not a run"))
    }

    #[test]
    fn what_is_written_is_read() {
        let lines = [line("mixtral", 1, 0.8), line("mixtral", 16, 0.6)];
        let earlier = Earlier::parse(&run(&lines)).unwrap();
        assert_eq!((earlier.machines.as_slice(), earlier.cases.len()), (&[machine()][..], 2));
        let c = earlier.compare(&line("mixtral", 1, 0.9)).unwrap();
        assert!((c.earlier, (c.ratio - 0.9 / 0.8).abs() < 1e-12, c.within_spread) == (0.8, true, false), "{c:?}");
        assert_eq!(c.differs, [""; 0]);
        assert!(Comparison::columns(Some(&c)).contains("80.0 %  1.125 "), "{}", Comparison::columns(Some(&c)));
        assert!(earlier.compare(&line("mixtral", 16, 0.605)).unwrap().within_spread);
        assert_eq!(earlier.compare(&line("mixtral", 4, 0.9)), None);
        assert!(Comparison::columns(None).contains("new"));
        assert_eq!(earlier.missing(&lines[..1]), ["BF16, mixtral, 16 tokens: 60.0 % of read bandwidth"]);
    }

    #[test]
    fn runs_may_follow_each_other_and_the_last_counts() {
        let text = run(&[line("mixtral", 1, 0.8)]) + "\n" + &run(&[line("mixtral", 1, 0.4), line("gpt-oss", 1, 0.5)]);
        let earlier = Earlier::parse(&text).unwrap();
        assert_eq!((earlier.machines.len(), earlier.cases.len()), (2, 2));
        assert_eq!(earlier.compare(&line("mixtral", 1, 0.4)).unwrap().ratio, 1.0);
        // Scheduling is not a case.
        let with = format!("{text}{{\"scheduling\":1.5}}\n");
        assert_eq!(Earlier::parse(&with).unwrap().cases, earlier.cases);
    }

    #[test]
    fn what_differs_is_told() {
        let earlier = Earlier::parse(&run(&[line("2048x768x128x8", 1, 0.8)])).unwrap();
        let mut now = Line { tier: "avx2".into(), threads: 1, ..line("2048x768x128x8", 1, 0.8) };
        now.speed.reads = false;
        now.shape.experts = 64;
        let differs = earlier.compare(&now).unwrap().differs;
        assert_eq!(
            differs,
            ["sizes [2048, 768, 128, 8] earlier", "avx512bf16 earlier", "2 threads earlier", "read bandwidth earlier"]
        );
        let other = Machine { cpu: "Other CPU".into(), threads: 1, ..machine() };
        let preface = earlier.preface(&other).join("\n");
        for words in ["2026-11-20", "drift", "Some CPU earlier, Other CPU now", "threads: 2 earlier, 1 now"] {
            assert!(preface.contains(words), "{preface}");
        }
        assert_eq!(earlier.preface(&machine()).len(), 1);
    }

    #[test]
    fn what_is_not_a_run_is_refused_with_its_line() {
        let good = run(&[line("mixtral", 1, 0.8)]);
        assert!(error("").contains("no cases"));
        assert!(error(&header()).contains("no cases"));
        assert!(error("hello").starts_with("line 1: is not JSON"), "{}", error("hello"));
        let cut = &good[..good.len() - 20];
        assert!(error(cut).starts_with("line 2: is not JSON") && error(cut).contains("cut off"), "{}", error(cut));
        let case = good.lines().nth(1).unwrap();
        assert!(error(case).starts_with("line 1: comes before"), "{}", error(case));
        for not_an_object in ["3", "[]", "null", "\"kt_bench\""] {
            assert!(error(not_an_object).starts_with("line 1: comes before"), "{not_an_object}");
            let second = format!("{}\n{not_an_object}", header());
            assert!(error(&second).starts_with("line 2: `fraction_quartiles` is missing"), "{}", error(&second));
        }
        let newer = good.replace("\"kt_bench\":1", "\"kt_bench\":2");
        assert!(error(&newer).starts_with("line 1: was written in version 2"), "{}", error(&newer));
        for (from, to, says) in [
            ("\"kt_bench\":1", "\"kt_bench\":\"1\"", "`kt_bench` is missing or not a whole"),
            ("\"cpu\":\"Some CPU\"", "\"cpu\":7", "`cpu` is missing or not a text"),
            ("\"tokens\":1", "\"tokens\":-1", "`tokens` is missing or not a whole number"),
            ("\"tokens\":1", "\"tokens\":1.5", "`tokens` is missing or not a whole number"),
            ("\"fraction_of_limit\":0.8", "\"fraction_of_limit\":0", "`fraction_of_limit` is missing or not a number"),
            ("\"fraction_of_limit\":0.8", "\"fraction_of_limit\":1e999", "is not JSON"),
            ("\"fraction_quartiles\":[", "\"fraction_quartiles\":[\"x\",", "not two numbers"),
            ("\"format\":\"BF16\",", "", "`format` is missing"),
        ] {
            assert!(good.contains(from), "{from}");
            let e = error(&good.replacen(from, to, 1));
            assert!(e.contains(says) && e.starts_with("line "), "{to}: {e}");
        }
    }

    #[test]
    fn files_that_cannot_be_read_are_named() {
        let e = format!("{:#}", Earlier::read(Path::new("/nonexistent/run.json")).unwrap_err());
        assert!(e.contains("--compare") && e.contains("/nonexistent/run.json"), "{e}");
        let path = std::env::temp_dir().join(format!("kt-compare-{}", std::process::id()));
        std::fs::write(&path, [0xff, 0xfe, 0x00]).unwrap();
        let e = format!("{:#}", Earlier::read(&path).unwrap_err());
        std::fs::remove_file(&path).unwrap();
        assert!(e.contains("cannot read") && e.contains("UTF-8"), "{e}");
    }
}
