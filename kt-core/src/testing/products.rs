//! A kernel whose products are a test's.

use std::ops::Range;

use crate::cpu::input::{InputLayout, Inputs};
use crate::cpu::kernel::{Kernel, Outputs, Scratch};
use crate::cpu::portable::Portable;
use crate::cpu::tier::Tier;
use crate::error::Unsupported;
use crate::format::{Format, Matrix};

/// [`Portable`], but for [`product`](Kernel::product), which a function does, and for the outputs that it takes together.
#[derive(Debug, Clone, Copy)]
pub struct Products<const PANEL: usize, F> {
    of: F,
    many: Option<(usize, F)>,
}

impl<const PANEL: usize, F> Products<PANEL, F> {
    /// By this function.
    pub fn new(of: F) -> Self {
        Products { of, many: None }
    }

    /// By another function in calls of so many rows and more.
    pub fn with_many(self, rows: usize, of: F) -> Self {
        Products { many: Some((rows, of)), ..self }
    }
}

impl<const PANEL: usize, F> Kernel for Products<PANEL, F>
where
    F: Fn(Outputs<'_>, Inputs<'_>, Range<usize>, &mut [f32], &mut Scratch) + Copy + Send + Sync + 'static,
{
    const PANEL: usize = PANEL;

    fn tier(self) -> Tier {
        Portable.tier()
    }

    fn accepts(self, format: Format, rows: usize, cols: usize) -> Result<(InputLayout, &'static str), Unsupported> {
        Portable.accepts(format, rows, cols)
    }

    fn packed_bytes(self, format: Format, rows: usize, cols: usize) -> Option<usize> {
        Portable.packed_bytes(format, rows, cols)
    }

    fn for_many(self) -> Option<(usize, Self)> {
        self.many.map(|(rows, of)| (rows, Products::new(of)))
    }

    fn invariant(self) -> Self {
        Products::new(self.of)
    }

    fn layout_version(self) -> u32 {
        Portable.layout_version()
    }

    fn pack(self, matrix: &Matrix, rows: Range<usize>, out: &mut [u8]) {
        Portable.pack(matrix, rows, out);
    }

    fn product(self, outputs: Outputs<'_>, x: Inputs<'_>, rows: Range<usize>, out: &mut [f32], scratch: &mut Scratch) {
        (self.of)(outputs, x, rows, out, scratch);
    }
}
