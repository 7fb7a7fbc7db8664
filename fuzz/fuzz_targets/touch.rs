//! What a host does with a checkpoint that opened: nothing of it may panic, whatever the file says.

use kt_core::source::names::Names;
use kt_core::{Proj, WeightSource};

/// Longest row to decode: files may claim rows as long as themselves.
const MOST: usize = 1 << 20;

/// Asks for everything that a source offers.
pub fn touch(source: &dyn WeightSource) {
    for layer in source.layers() {
        assert!(layer.experts > 0 && layer.top_k > 0 && layer.top_k <= layer.experts);
        let _ = (layer.expert_bytes(), layer.format_label(), source.routing(layer.index));
        for expert in [0, layer.experts - 1, layer.experts] {
            for proj in Proj::ALL {
                let _ = source.tensor_name(layer.index, expert, proj);
                let _ = source.bias(layer.index, expert, proj);
                if let Ok(m) = source.matrix(layer.index, expert, proj) {
                    assert!(expert < layer.experts, "an expert that is not there");
                    assert_eq!(
                        (m.rows(), m.cols(), m.format()),
                        (layer.shape(proj).0, layer.shape(proj).1, layer.format(proj))
                    );
                    let _ = m.check_scales();
                    decode(&m);
                }
            }
            source.release(layer.index, expert);
        }
    }
    for name in source.tensors() {
        if let Ok(m) = source.tensor(&name) {
            decode(&m);
        }
        source.release_tensor(&name);
    }
    if let Some(names) = Names::of(source) {
        let _ = (names.router(0), names.correction_bias(0), names.shared(0, Proj::Up), names.shared_gate(0));
    }
    let _ = (source.dense_bytes(), source.metadata().family(), source.side_file("tokenizer.json"));
}

fn decode(m: &kt_core::Matrix) {
    if m.cols() <= MOST {
        let mut row = vec![0.0; m.cols()];
        m.decode_row(0, &mut row);
        m.decode_row(m.rows() - 1, &mut row);
    }
}
