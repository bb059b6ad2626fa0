// What lets one header serve g++ and nvcc: function qualifiers, nothing else.
#ifndef KVCANARY_HOST_DEVICE_H_
#define KVCANARY_HOST_DEVICE_H_

#ifdef __CUDACC__
#define KVC_HD __host__ __device__ __forceinline__
#else
#define KVC_HD inline
#endif

#endif  // KVCANARY_HOST_DEVICE_H_
