//! What a subscriber of `tracing` sees of a load and of layer calls. It is global: the file holds one test.

use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use kt_core::cpu::CpuBackend;
use kt_core::cpu::portable::Portable;
use kt_core::source::synthetic::SyntheticSource;
use kt_core::{Batch, Candidate, RuntimeBuilder};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Writes down spans as `name key=value …`, and how they are entered and left.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<(Vec<String>, Vec<String>)>>);

struct Fields(String);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0 += &format!(" {field}={value:?}");
    }
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("kt_core")
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut fields = Fields(span.metadata().name().into());
        span.record(&mut fields);
        let mut log = self.0.lock().unwrap();
        log.0.push(fields.0);
        Id::from_u64(log.0.len() as u64)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields("event".into());
        event.record(&mut fields);
        self.0.lock().unwrap().1.push(fields.0);
    }

    fn enter(&self, id: &Id) {
        let mut log = self.0.lock().unwrap();
        let name = format!("> {}", log.0[id.into_u64() as usize - 1]);
        log.1.push(name);
    }

    fn exit(&self, id: &Id) {
        let mut log = self.0.lock().unwrap();
        let name = format!("< {}", log.0[id.into_u64() as usize - 1]);
        log.1.push(name);
    }
}

#[test]
fn loads_and_calls_are_spans() {
    let log = Log::default();
    tracing::subscriber::set_global_default(log.clone()).unwrap();
    let take = || std::mem::take(&mut log.0.lock().unwrap().1);
    let registry = |_| vec![Candidate::new("portable", Ok(CpuBackend::new("portable", Portable)))];
    let runtime = RuntimeBuilder::new(registry).threads(1).build().unwrap();
    let experts = runtime.load(&SyntheticSource::builder().layers(2).build().unwrap()).unwrap();
    let lines = take();
    let of = |line: &String| line.split(" path=").next().unwrap().split(" packed_bytes").next().unwrap().to_string();
    let short: Vec<String> = lines.iter().map(of).collect();
    assert_eq!(short.first().map(String::as_str), Some("> load"), "{lines:?}");
    assert_eq!(short.last().map(String::as_str), Some("< load"), "{lines:?}");
    assert!(lines[0].contains("threads=1"), "{lines:?}");
    for layer in 0..2 {
        let i = short.iter().position(|l| *l == format!("> load_layer layer={layer}")).unwrap();
        assert_eq!(short[i + 1], format!("> placement layer={layer}"), "{lines:?}");
        assert_eq!(short[i + 2], format!("< placement layer={layer}"), "{lines:?}");
        let end = short.iter().position(|l| *l == format!("< load_layer layer={layer}")).unwrap();
        let event = short[i..end].iter().find(|l| l.starts_with("event")).unwrap();
        assert!(event.contains("backend=portable") && event.contains(&format!("layer={layer}")), "{event}");
    }

    let batch = || Batch::new(3, vec![0.5; 3 * 256], vec![0, 1, 2, 3, 4, 5], vec![0.5; 6]).unwrap();
    let layer = experts.layer(1).unwrap();
    layer.forward(&mut batch()).unwrap();
    assert_eq!(take(), ["> forward layer=1 tokens=3", "< forward layer=1 tokens=3"]);
    layer.submit(batch()).wait().unwrap();
    let inside = ["> forward layer=1 tokens=3", "< forward layer=1 tokens=3"];
    assert_eq!(take(), ["> submit layer=1 tokens=3", inside[0], inside[1], "< submit layer=1 tokens=3"]);
}
