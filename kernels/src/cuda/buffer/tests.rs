use super::*;

/// Bytes that nobody has, for what is decided on the host.
fn bytes(at: CUdeviceptr, len: usize) -> ViewMut<'static, u8> {
    ViewMut { at, len, of: PhantomData }
}

#[test]
fn bytes_become_elements_where_alignment_and_length_allow() {
    let whole = bytes(0x1010, 48);
    let view = whole.read().cast::<f32>().unwrap();
    assert_eq!((view.address(), view.len()), (0x1010, 12));
    let view = bytes(0x1010, 48).cast::<[u32; 3]>().unwrap();
    assert_eq!((view.address(), view.len()), (0x1010, 4));
    assert_eq!(bytes(0x1000, 0).cast::<bf16>().unwrap().len(), 0);
    let odd = bytes(0x1010, 50).cast::<f32>().map(drop);
    assert_eq!(odd, Err(ShapeError::Length { what: "bytes of elements", needed: 48, found: 50 }));
    let shifted = bytes(0x1008, 48).read().cast::<f32>().map(drop);
    let needed = "a multiple of 16";
    assert_eq!(shifted, Err(ShapeError::Dimension { what: "address of elements", needed, found: 0x1008 }));
    assert!(bytes(0x1000, 16).cast::<[u32; 0]>().is_err(), "elements of no bytes");
}

#[test]
fn a_split_gives_both_parts_and_nothing_between() {
    let (left, right) = bytes(0x1000, 64).cast::<u32>().unwrap().split_at(5).unwrap();
    assert_eq!((left.address(), left.len(), right.address(), right.len()), (0x1000, 5, 0x1014, 11));
    let (left, right) = bytes(0x1000, 64).split_at(64).unwrap();
    assert_eq!((left.len(), right.len()), (64, 0));
    let beyond = bytes(0x1000, 64).split_at(65).map(drop);
    assert_eq!(beyond, Err(ShapeError::Length { what: "device buffer", needed: 65, found: 64 }));
}
