//! A backend that panics in each of its functions: in which one, a layer's index or a matrix's number of rows says.

use std::sync::Arc;

use kt_core::cpu::input::InputLayout;
use kt_core::cpu::team::Team;
use kt_core::cpu::tier::Tier;
use kt_core::{
    Backend, ExpertBank, Fit, Format, LayerSpec, LinearOp, LoadContext, Matrix, Pending, Result, Unsupported,
    WeightSource, Work,
};

struct Panics;

/// Panics at its end.
struct Bomb(bool, &'static str);

impl Drop for Bomb {
    fn drop(&mut self) {
        assert!(!self.0, "{}", self.1);
    }
}

struct Bank {
    layer: usize,
    team: Arc<Team>,
    _bomb: Bomb,
}

struct Linear {
    rows: usize,
    cols: usize,
    _bomb: Bomb,
}

fn fit() -> Fit {
    Fit {
        rank: 0,
        tier: "portable".into(),
        how: "panics".into(),
        packed_bytes: 0,
        mapped_bytes: 0,
        scratch_bytes_per_token: 0,
        inputs: [InputLayout::F32; 2],
    }
}

impl Backend for Panics {
    fn name(&self) -> &str {
        "panics"
    }

    fn probe(&self, layer: &LayerSpec) -> Result<Fit, Unsupported> {
        assert!(layer.index != 1, "in probe");
        Ok(fit())
    }

    fn load(
        &self,
        layer: &LayerSpec,
        _: &[u32],
        _: &dyn WeightSource,
        context: &LoadContext,
    ) -> Result<Box<dyn ExpertBank>> {
        assert!(layer.index != 2, "in load");
        Ok(Box::new(Bank {
            layer: layer.index,
            team: context.team.clone(),
            _bomb: Bomb(layer.index == 8, "in a bank's drop"),
        }))
    }

    fn probe_linear(&self, _: Format, rows: usize, _: usize) -> Result<Fit, Unsupported> {
        assert!(rows != 1, "in probe_linear");
        Ok(fit())
    }

    fn linear(&self, matrix: &Matrix, _: &LoadContext) -> Result<Box<dyn LinearOp>> {
        assert!(matrix.rows() != 2, "in linear");
        let bomb = Bomb(matrix.rows() == 4, "in a matrix's drop");
        Ok(Box::new(Linear { rows: matrix.rows(), cols: matrix.cols(), _bomb: bomb }))
    }
}

impl Drop for Panics {
    fn drop(&mut self) {
        panic!("in the backend's drop");
    }
}

impl ExpertBank for Bank {
    fn submit(&self, work: Work) -> Pending<Work> {
        assert!(self.layer != 4, "in submit");
        let bomb = Bomb(self.layer == 6, "in a pending's drop");
        let fails = self.layer == 5;
        Pending::new(move || {
            let _bomb = bomb;
            assert!(!fails, "in wait");
            Ok(work)
        })
    }

    fn packed_bytes(&self) -> u64 {
        assert!(self.layer != 7, "in packed_bytes");
        0
    }

    fn run(&self, work: Work) -> Result<Work> {
        assert!(self.layer != 3, "in run");
        if self.layer == 9 {
            self.team.region().run(64, |task, _| assert!(task != 40, "in task forty"));
        }
        Ok(work)
    }
}

impl LinearOp for Linear {
    fn rows(&self) -> usize {
        self.rows
    }

    fn cols(&self) -> usize {
        self.cols
    }

    fn forward(&self, _: &[f32], y: &mut [f32]) {
        assert!(self.rows != 3, "in forward");
        y.fill(1.0);
    }

    fn packed_bytes(&self) -> u64 {
        0
    }
}

fn backend(cap: Tier) -> Result<Panics, Unsupported> {
    assert!(cap != Tier::Portable, "in the constructor");
    Ok(Panics)
}

kt_core::declare_backend!("panics", backend);
